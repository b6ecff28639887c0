"""`dot4`, u8 x s8 four at a time into i32, in each target's best form; all give the same integers.

    AVX-512-VNNI, AVX-VNNI   vpdpbusd
    other x86                vpmaddubsw + vpmaddwd where no pair can saturate, else two vpmaddwd
                             on the even and the odd bytes widened to 16 bits
    elsewhere                widening multiplies
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignis.kernels.lang import Value, i8, i16, i32

if TYPE_CHECKING:
    from ignis.native.emit import LlvmBuilder
    from ignis.target import Target

# Two products of a byte of at most 129 and one of at least -127: 32766 in size, so no saturation.
_SAFE_FOR_MADDUBS = 129

_MADD = {128: "llvm.x86.sse2.pmadd.wd", 256: "llvm.x86.avx2.pmadd.wd",
         512: "llvm.x86.avx512.pmaddw.d.512"}  # fmt: skip
_MADDUBS = {128: "llvm.x86.ssse3.pmadd.ub.sw.128", 256: "llvm.x86.avx2.pmadd.ub.sw",
            512: "llvm.x86.avx512.pmaddubs.w.512"}  # fmt: skip


def is_wide(target: Target) -> bool:
    """Whether bytes above 129 cost no more than others."""
    return not target.is_x86 or target.has("avx512vnni") or target.has("avxvnni")


def emit(k: LlvmBuilder, acc: Value, u: Value, s: Value, u_max: int) -> Value:
    """acc[i] + sum over j of u[4i+j] * s[4i+j]."""
    target = k.target
    if not target.is_x86:
        return _widening(k, acc, u, s)
    has_dot = is_wide(target)
    widest = 512 if target.has("avx512bw") and target.vector_bits == 512 else target.vector_bits
    if has_dot and not target.has("avx512vnni"):
        widest = 256
    if u.type.nbytes * 8 > widest:
        halves = [
            emit(k, half(acc), half(u), half(s), u_max) for half in (k.low_half, k.high_half)
        ]
        return k.concat(*halves)
    bits = u.type.nbytes * 8
    if has_dot:
        return k.intrinsic(f"llvm.x86.avx512.vpdpbusd.{bits}", acc.type, acc, u, s)
    words = i16.x(u.type.lanes // 2)
    if u_max <= _SAFE_FOR_MADDUBS:
        pairs = k.intrinsic(_MADDUBS[bits], words, u, s)
        return acc + k.intrinsic(_MADD[bits], acc.type, pairs, k.const(words, 1))
    u_words, s_words = u.bits(words), s.bits(words)
    even = k.intrinsic(_MADD[bits], acc.type, u_words & 0xFF, (s_words << 8).sar(8))
    odd = k.intrinsic(_MADD[bits], acc.type, u_words >> 8, s_words.sar(8))
    return acc + even + odd


def _widening(k: LlvmBuilder, acc: Value, u: Value, s: Value) -> Value:
    lanes = acc.type.lanes
    if u.type.element != i8:
        raise TypeError("dot4 wants bytes")
    for j in range(4):
        indices = list(range(j, 4 * lanes, 4))
        a = k.shuffle(u, u, indices).zext(i32)
        b = k.shuffle(s, s, indices).to(i32)
        acc = acc + a * b
    return acc
