"""`dot2`, i16 x i16 in pairs into i32: `pmaddwd` on x86, widening multiplies elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignis.kernels.lang import Value, i32

if TYPE_CHECKING:
    from ignis.native.emit import LlvmBuilder

_MADD = {128: "llvm.x86.sse2.pmadd.wd", 256: "llvm.x86.avx2.pmadd.wd",
         512: "llvm.x86.avx512.pmaddw.d.512"}  # fmt: skip


def emit(k: LlvmBuilder, acc: Value, a: Value, b: Value) -> Value:
    """acc[i] + a[2i] * b[2i] + a[2i+1] * b[2i+1]."""
    if not k.target.is_x86:
        for side in (0, 1):
            indices = list(range(side, a.type.lanes, 2))
            acc = acc + k.shuffle(a, a, indices).to(i32) * k.shuffle(b, b, indices).to(i32)
        return acc
    bits = a.type.nbytes * 8
    if bits > k.target.vector_bits:
        halves = [emit(k, half(acc), half(a), half(b)) for half in (k.low_half, k.high_half)]
        return k.concat(*halves)
    return acc + k.intrinsic(_MADD[bits], acc.type, a, b)
