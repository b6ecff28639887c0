"""`dot4`, u8 x s8 four at a time into i32, in each target's best form; all give the same integers.

    AVX-512-VNNI, AVX-VNNI   vpdpbusd
    other x86                vpmaddubsw + vpmaddwd where no pair can saturate, else two vpmaddwd
                             on the even and the odd bytes widened to 16 bits
    elsewhere                widening multiplies

`emit_sum` adds several: on x86 without a dot instruction, what vpmaddubsw gives is added as words
for as long as they cannot overflow, and only then widened; a signed byte is its size and its sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ignis.kernels.lang import SMALL_BYTE, TiledDot4, Value, i8, i16, i32

if TYPE_CHECKING:
    from ignis.native.emit import LlvmBuilder
    from ignis.target import Target

_MADD = {128: "llvm.x86.sse2.pmadd.wd", 256: "llvm.x86.avx2.pmadd.wd",
         512: "llvm.x86.avx512.pmaddw.d.512"}  # fmt: skip
_MADDUBS = {128: "llvm.x86.ssse3.pmadd.ub.sw.128", 256: "llvm.x86.avx2.pmadd.ub.sw",
            512: "llvm.x86.avx512.pmaddubs.w.512"}  # fmt: skip
_SIGN = {128: "llvm.x86.ssse3.psign.b.128", 256: "llvm.x86.avx2.psign.b"}


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
    if u_max <= SMALL_BYTE:
        return acc + k.intrinsic(_MADD[bits], acc.type, pairs(k, u, s), k.const(words, 1))
    u_words, s_words = u.bits(words), s.bits(words)
    even = k.intrinsic(_MADD[bits], acc.type, u_words & 0xFF, (s_words << 8).sar(8))
    odd = k.intrinsic(_MADD[bits], acc.type, u_words >> 8, s_words.sar(8))
    return acc + even + odd


def emit_sum(
    k: LlvmBuilder, acc: Value, a: Sequence[Value], s: Sequence[Value], u_max: int | None
) -> Value:
    """acc and the sum of all `emit`; with `u_max` None the bytes of `a` are signed."""
    target = k.target
    if not target.is_x86 or is_wide(target):
        return _chains(k, acc, a, s, u_max)
    # There is no vpsignb of 512 bits.
    widest = min(target.vector_bits, 256) if u_max is None else target.vector_bits
    bits = a[0].type.nbytes * 8
    if bits > widest:
        halves = [
            emit_sum(k, half(acc), [half(v) for v in a], [half(v) for v in s], u_max)
            for half in (k.low_half, k.high_half)
        ]
        return k.concat(*halves)
    if u_max is None:
        for x, y in zip(a, s, strict=True):
            sign = _SIGN[bits]
            size = k.intrinsic(sign, x.type, x, x)
            acc = emit(k, acc, size, k.intrinsic(sign, x.type, y, x), SMALL_BYTE)
        return acc
    n_words = pairs_in_word(u_max)
    if n_words < 2:
        return _chains(k, acc, a, s, u_max)
    words = i16.x(a[0].type.lanes // 2)
    for first in range(0, len(a), n_words):
        sums = [
            pairs(k, x, y)
            for x, y in zip(a[first : first + n_words], s[first : first + n_words], strict=True)
        ]
        total = sums[0]
        for pair in sums[1:]:
            total = total + pair
        acc = acc + k.intrinsic(_MADD[bits], acc.type, total, k.const(words, 1))
    return acc


def pairs(k: LlvmBuilder, u: Value, s: Value) -> Value:
    """u[2i] * s[2i] + u[2i+1] * s[2i+1] as words, for u up to `SMALL_BYTE`; x86 alone has it."""
    bits = u.type.nbytes * 8
    if bits > k.target.vector_bits:
        return k.concat(*[pairs(k, half(u), half(s)) for half in (k.low_half, k.high_half)])
    return k.intrinsic(_MADDUBS[bits], i16.x(u.type.lanes // 2), u, s)


def pairs_in_word(u_max: int) -> int:
    """How many sums of two products, of bytes up to u_max and -128, are a word when added."""
    return 128 // u_max


def side_by_side(k: LlvmBuilder, us: Sequence[Value], u_max: int) -> TiledDot4 | None:
    """`Builder.tile_dot4` where one instruction is a `dot4` and the vectors stay in registers."""
    if not k.target.has("avx512vnni") or k.target.vector_bits != 512:
        return None
    return _SideBySide(k, us, u_max)


class _SideBySide(NamedTuple):
    """A sum of products is a chain of instructions, each of which waits for the one before.

    With those of several x in turn one is always ready. One behind the other they would wait in
    the processor's queue, which holds a few of them only.
    """

    k: LlvmBuilder
    us: Sequence[Value]
    u_max: int
    tile: int = 4

    def sums(
        self, starts: Sequence[Value], xs: Sequence[Value], first: int, last: int
    ) -> list[Value]:
        us, totals = self.us[first:last], list(starts)
        fours = [[x.at(4 * j).load(i32).splat(16).bits(us[0].type) for x in xs]
                 for j in range(first, last)]  # fmt: skip
        if len(xs) == 1:
            return [_chains(self.k, totals[0], us, [four for (four,) in fours], self.u_max)]
        for u, four in zip(us, fours, strict=True):
            totals = [
                emit(self.k, total, u, x, self.u_max) for total, x in zip(totals, four, strict=True)
            ]
        return totals


def _chains(
    k: LlvmBuilder, acc: Value, a: Sequence[Value], s: Sequence[Value], u_max: int | None
) -> Value:
    """One `emit` behind the other, as two short chains: an instruction waits for fewer."""
    if len(a) > 4:
        middle, zero = len(a) // 2, k.const(acc.type, 0)
        first = _chains(k, acc, a[:middle], s[:middle], u_max)
        return first + _chains(k, zero, a[middle:], s[middle:], u_max)
    for x, y in zip(a, s, strict=True):
        if u_max is None:
            # x = (x + 128) - 128, and adding 128 to a byte flips its highest bit.
            acc = acc - emit(k, k.const(acc.type, 0), k.const(x.type, -128), y, 128)
            acc = emit(k, acc, x ^ -128, y, 255)
        else:
            acc = emit(k, acc, x, y, u_max)
    return acc


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
