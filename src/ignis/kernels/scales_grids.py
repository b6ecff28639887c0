"""The scales of the IQ formats: odd numbers under one f16, for 32 values or for 16.

All of d * (2 n + 1) / divisor is exact in f32, so that the float operations are those of Q8_0, or
of Q6_K where scales belong to 16 values (NUMERICS 2).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from ignis.kernels.lang import Builder, Type, Value, f32, i16, i32
from ignis.kernels.rows import Index
from ignis.kernels.scales import Field, Halves, Header, Read, Scheme, Terms, Whole, half, shift


@dataclass(frozen=True, slots=True)
class TopNibbles(Field):
    """One dword: the top nibbles of eight numbers, `step` bytes apart from `at` on."""

    of: Type = i32
    step: int = 4

    def word(self, read: Read, i: int) -> Value:
        nibbles = [
            shift(read(self.at + self.step * b, self.of).zext(i32), self.of.bits - 4) << 4 * b
            for b in range(8)
        ]
        return reduce(operator.or_, nibbles)


class Odd4(NamedTuple):
    """IQ2_XXS, IQ3_XXS, IQ3_S, IQ1_S: d, and a dword of eight nibbles n; d * (2 n + 1) / divisor.

    Of a nibble only the bits in `mask` count. The quotient is exact.
    """

    nibbles: Field
    divisor: int = 1
    mask: int = 15

    @property
    def fields(self) -> tuple[Field, ...]:
        return Field(0, i16), self.nibbles

    def terms(self, k: Builder, header: Header, b: Index, offset: int) -> Terms:
        n = shift(header.word(1), 4 * b) & self.mask
        return Whole(offset, half(header.word(0)) * ((n * 2 + 1).to(f32) * (1 / self.divisor)))


class OddPairs4(NamedTuple):
    """IQ2_XS, IQ2_S: d, and eight bytes at `at`, a nibble n for 16 values: d / 8 * (2 n + 1)."""

    at: int

    @property
    def fields(self) -> tuple[Field, ...]:
        return Field(0, i16), Field(self.at, i32, 2)

    def terms(self, k: Builder, header: Header, b: Index, offset: int) -> Terms:
        pair = shift(header.word(1, b // 4), 8 * (b % 4))
        sc = (pair & 15) * 2 + 1, ((pair >> 4) & 15) * 2 + 1
        return Halves(offset, half(header.word(0)) * (1 / 8), sc)


class Odd3(NamedTuple):
    """IQ1_M: two dwords, four words with the nibbles of d at the top and below them 3-bit n.

    d / 8 * (2 n + 1), an n for 16 values: those of block b are at bit 6 * (b % 2) of word b / 2.
    """

    fields: tuple[Field, ...] = (Field(48, i32, 2),)

    def terms(self, k: Builder, header: Header, b: Index, offset: int) -> Terms:
        low, high = header.word(0, 0), header.word(0, 1)
        d = ((low >> 12) & 0xF) | ((low >> 24) & 0xF0) | ((high >> 4) & 0xF00) | (
            (high >> 16) & 0xF000
        )  # fmt: skip
        pair = shift(header.word(0, b // 4), 16 * (b // 2 % 2) + 6 * (b % 2))
        sc = (pair & 7) * 2 + 1, ((pair >> 3) & 7) * 2 + 1
        return Halves(offset, half(d) * (1 / 8), sc)


SCHEMES: dict[str, Scheme] = {
    "iq1_s": Odd4(TopNibbles(34, i32, of=i16, step=2), 8, mask=7),
    "iq1_m": Odd3(),
    "iq2_xxs": Odd4(TopNibbles(6, i32, step=8), 8),
    "iq2_xs": OddPairs4(66),
    "iq2_s": OddPairs4(74),
    "iq3_xxs": Odd4(TopNibbles(66, i32), 4),
    "iq3_s": Odd4(Field(106, i32)),
}
