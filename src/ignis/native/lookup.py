"""`lookup`, table bytes by index: a byte shuffle on x86 and Arm, a tree of choices elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ignis.kernels.lang import Value, i8

if TYPE_CHECKING:
    from ignis.native.emit import LlvmBuilder

_PSHUFB = {128: "llvm.x86.ssse3.pshuf.b.128", 256: "llvm.x86.avx2.pshuf.b",
           512: "llvm.x86.avx512.pshuf.b.512"}  # fmt: skip


def emit(k: LlvmBuilder, table: Sequence[int], indices: Value) -> Value:
    """table[i] for every byte lane; indices lie in 0..15."""
    target, lanes = k.target, indices.type.lanes
    if not (target.is_x86 or target.is_arm):
        return _choose(k, table, indices, bit=3)
    if lanes * 8 > target.vector_bits:
        parts = [emit(k, table, half(indices)) for half in (k.low_half, k.high_half)]
        return k.concat(*parts)
    entries = k.const(i8.x(lanes), list(table) * (lanes // 16))
    name = _PSHUFB[lanes * 8] if target.is_x86 else "llvm.aarch64.neon.tbl1.v16i8"
    return k.intrinsic(name, indices.type, entries, indices)


def _choose(k: LlvmBuilder, table: Sequence[int], indices: Value, bit: int) -> Value:
    """By the bits of the index, from the highest down."""
    if bit < 0:
        return k.const(indices.type, table[0])
    low, high = table[: len(table) // 2], table[len(table) // 2 :]
    is_high = (indices & (1 << bit)) != 0
    return k.select(is_high, _choose(k, high, indices, bit - 1), _choose(k, low, indices, bit - 1))
