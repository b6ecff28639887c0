"""The scales of the integer formats: where they lie, and the float operations of NUMERICS 2.

A *group* is what shares a header in the file: one block of 32 weights, or a super-block of eight.
Its header is a few numbers a row, the `fields`. A panel holds the same fields, of 16 rows side by
side and otherwise as the file has them, so scales stay as compact as in the file.

A scheme (`Single`, `Power`, `Pairs6`, ...) turns the header into the `Terms` of one block. It is
written once: the header may come from a panel, from 16 rows in the file or from one row, and the
block's number b be known while the kernel is built or only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from ignis.kernels import a8
from ignis.kernels.lang import Builder, Type, Value, f16, f32, i8, i16, i32
from ignis.kernels.rows import ROWS, Index, PanelRows

Read: TypeAlias = "Callable[[int, Type], Value]"
"""The number of a type at a byte of a group: of one row, or of 16 rows as a vector."""


@dataclass(frozen=True, slots=True)
class Field:
    """`count` numbers of a group's header, at byte `at`. Four dwords are read at once."""

    at: int
    type: Type
    count: int = 1

    def word(self, read: Read, i: int) -> Value:
        return read(self.at + i * self.type.nbytes, self.type)

    def of_rows(self, rows: PanelRows) -> list[Value]:
        if self.count == 4:
            return rows.dwords(self.at)
        return [self.word(rows.gather, i) for i in range(self.count)]


class Header(Protocol):
    """The header of one group; `word(f, i)` is number i of field f, of one row or of 16."""

    def word(self, field: int, i: Index = 0) -> Value: ...


class PanelHeader:
    """The header of 16 rows in a panel: one vector a number."""

    def __init__(self, fields: tuple[Field, ...], panel: Value) -> None:
        self._fields, self._panel = fields, panel

    @staticmethod
    def nbytes(fields: tuple[Field, ...]) -> int:
        return sum(ROWS * field.type.nbytes * field.count for field in fields)

    def word(self, field: int, i: Index = 0) -> Value:
        vector = self._fields[field].type.x(ROWS)
        start = self.nbytes(self._fields[:field])
        return self._panel.at(start + i * vector.nbytes).load(vector)


class FileHeader:
    """The header of 16 rows in the file."""

    def __init__(self, fields: tuple[Field, ...], rows: PanelRows) -> None:
        self._fields = fields
        self.words = [field.of_rows(rows) for field in fields]

    def word(self, field: int, i: Index = 0) -> Value:
        assert isinstance(i, int)
        return self.words[field][i]

    def store(self, panel: Value) -> PanelHeader:
        """Write what `PanelHeader` reads."""
        at = 0
        for words in self.words:
            for word in words:
                panel.at(at).store(word)
                at += word.type.nbytes
        return PanelHeader(self._fields, panel)


class RowHeader:
    """The header of one row in the file; words are scalars."""

    def __init__(self, fields: tuple[Field, ...], row: Value) -> None:
        self._fields, self._row = fields, row

    def word(self, field: int, i: Index = 0) -> Value:
        assert isinstance(i, int)
        return self._fields[field].word(lambda at, type_: self._row.at(at).load(type_), i)


class Products(Protocol):
    """The integer dot products of one block of 16 rows with one token; lanes are rows."""

    def whole(self, start: Value) -> Value:
        """start + the products of all 32 values."""

    def halves(self) -> tuple[Value, Value]:
        """The products of the first and of the last 16 values."""


class Terms(Protocol):
    """What one block adds to a sum."""

    def start(self, k: Builder, x: Value, lanes: int) -> Value:
        """What the integer sums start from, i32, for the activations at `x` (a block of A8)."""

    def add(self, k: Builder, acc: Value, products: Products, x: Value) -> Value:
        """`acc` and this block's terms, for the activations at `x` (a block of A8)."""

    def decoded(self) -> tuple[tuple[Value, Value], tuple[Value, Value] | None]:
        """The scales of both halves, and what to add to the values of each, for decoding."""


class Scheme(Protocol):
    """How a format's header gives the terms of block b; `offset` is subtracted from each code."""

    @property
    def fields(self) -> tuple[Field, ...]: ...

    def terms(self, k: Builder, header: Header, b: Index, offset: int) -> Terms: ...


# -- what a block adds --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Whole:
    """One scale for 32 values and perhaps a minimum m, which is added."""

    offset: int
    dw: Value
    m: Value | None = None

    def start(self, k: Builder, x: Value, lanes: int) -> Value:
        return a8.start(k, x, self.offset, lanes)

    def add(self, k: Builder, acc: Value, products: Products, x: Value) -> Value:
        lanes = acc.type.lanes
        isum = products.whole(self.start(k, x, lanes))
        acc = k.fma(isum.to(f32), self.dw * a8.scale(k, x, lanes), acc)
        return acc if self.m is None else k.fma(self.m, a8.scaled_sum(k, x, lanes), acc)

    def decoded(self) -> tuple[tuple[Value, Value], tuple[Value, Value] | None]:
        return (self.dw, self.dw), None if self.m is None else (self.m, self.m)


@dataclass(frozen=True, slots=True)
class Minimum:
    """-dmin * m, with an integer m for each half."""

    minus_dmin: Value
    m: tuple[Value, Value]

    def add(self, k: Builder, acc: Value, x: Value) -> Value:
        lanes = acc.type.lanes
        isum = _dot_halves(k, k.const(i32.x(lanes), 0), self.m, x)
        return k.fma(isum.to(f32), self.minus_dmin * a8.scale(k, x, lanes), acc)

    def decoded(self) -> tuple[Value, Value]:
        return self.minus_dmin * self.m[0].to(f32), self.minus_dmin * self.m[1].to(f32)


@dataclass(frozen=True, slots=True)
class WholeLessMinimum:
    """One scale for 32 values; a minimum is subtracted."""

    dw: Value
    minimum: Minimum

    def start(self, k: Builder, x: Value, lanes: int) -> Value:
        return k.const(i32.x(lanes), 0)

    def add(self, k: Builder, acc: Value, products: Products, x: Value) -> Value:
        return self.minimum.add(k, Whole(0, self.dw).add(k, acc, products, x), x)

    def decoded(self) -> tuple[tuple[Value, Value], tuple[Value, Value] | None]:
        return (self.dw, self.dw), self.minimum.decoded()


class ScaledCodes(NamedTuple):
    """Where codes times their integer scales fit bytes: `sign` * product + `offset`, 0 to u_max."""

    offset: int
    u_max: int
    sign: int = 1


@dataclass(frozen=True, slots=True)
class Halves:
    """An integer scale for each 16 values, under one float scale."""

    offset: int
    d: Value
    sc: tuple[Value, Value]
    minimum: Minimum | None = None

    def start(self, k: Builder, x: Value, lanes: int) -> Value:
        return k.const(i32.x(lanes), 0)

    def add(self, k: Builder, acc: Value, products: Products, x: Value) -> Value:
        spare = self.offset != 0 and not k.free_shifts
        isum = self._in_floats(k, products, x) if spare else self._in_integers(k, products, x)
        acc = k.fma(isum, self.d * a8.scale(k, x, acc.type.lanes), acc)
        return acc if self.minimum is None else self.minimum.add(k, acc, x)

    def _in_integers(self, k: Builder, products: Products, x: Value) -> Value:
        """The products of both halves times their scales, as f32."""
        first, last = products.halves()
        if self.offset:
            offsets = a8.half_sums(k, x, self.offset, first.type.lanes)
            first, last = first - offsets[0], last - offsets[1]
        return (first * self.sc[0] + last * self.sc[1]).to(f32)

    def _in_floats(self, k: Builder, products: Products, x: Value) -> Value:
        """The same in fewer instructions; the offsets of both halves are one product of pairs.

        All is exact: with codes of six bits around 32, every term and every sum is at most
        2 * 16 * 32 * 127 * 128 < 2^24.
        """
        first, last = products.halves()
        offsets = self.sc[0] * -self.offset, self.sc[1] * -self.offset
        isum = _dot_halves(k, k.const(first.type, 0), offsets, x).to(f32)
        isum = k.fma(first.to(f32), self.sc[0].to(f32), isum)
        return k.fma(last.to(f32), self.sc[1].to(f32), isum)

    def scale_codes(
        self, k: Builder, vectors: Sequence[Value], to: ScaledCodes
    ) -> tuple[list[Value], Terms]:
        """Each code less `self.offset`, times its integer scale, as a byte around `to.offset`.

        Only d is left for the terms to multiply with, so that the 32 products are one sum. Two
        bytes are multiplied at a time as a word: no carry passes, as each result fits its byte.
        """
        scaled = []
        for half, sc in enumerate(self.sc):
            factor = sc * to.sign
            start = (to.offset - factor * self.offset) * 0x0101
            a, b = _word_pairs(factor, factor), _word_pairs(start, start)
            scaled += [
                (v.bits(a.type) * a + b).bits(v.type) for v in vectors[half * 4 : half * 4 + 4]
            ]
        d = self.d if to.sign > 0 else -self.d
        if self.minimum is None:
            return scaled, Whole(to.offset, d)
        return scaled, WholeLessMinimum(d, self.minimum)

    def decoded(self) -> tuple[tuple[Value, Value], tuple[Value, Value] | None]:
        scales = self.d * self.sc[0].to(f32), self.d * self.sc[1].to(f32)
        return scales, None if self.minimum is None else self.minimum.decoded()


def _dot_halves(k: Builder, acc: Value, factors: tuple[Value, Value], x: Value) -> Value:
    """acc + factors[0] * s0 + factors[1] * s1; factors fit 16 bits."""
    pairs = _word_pairs(*factors)
    sums = x.at(a8.HALVES_AT).load(i32).splat(acc.type.lanes)
    return k.dot2(acc, sums.bits(pairs.type), pairs)


def _word_pairs(low: Value, high: Value) -> Value:
    """The low 16 bits of two vectors of i32, lanes side by side."""
    return ((low & 0xFFFF) | (high << 16)).bits(i16.x(2 * low.type.lanes))


# -- how headers hold scales ------------------------------------------------------------------


class Single(NamedTuple):
    """One f16 scale, at `d_at`, and perhaps an f16 minimum, for the whole group."""

    d_at: int
    m_at: int | None = None

    @property
    def fields(self) -> tuple[Field, ...]:
        at = (self.d_at,) if self.m_at is None else (self.d_at, self.m_at)
        return tuple(Field(place, i16) for place in at)

    def terms(self, k: Builder, header: Header, b: Index, offset: int) -> Terms:
        m = None if self.m_at is None else half(header.word(1))
        return Whole(offset, half(header.word(0)), m)


class Power(NamedTuple):
    """MXFP4: a byte e for the scale 2^(e - 128)."""

    fields: tuple[Field, ...] = (Field(0, i8),)

    def terms(self, k: Builder, header: Header, b: Index, offset: int) -> Terms:
        e = header.word(0).zext(i32)
        small = k.select(e == 0, k.const(e.type, 0x00200000), k.const(e.type, 0x00400000))
        bits = k.select(e < 2, small, (e - 1) << 23)  # 2^-128 and 2^-127 are subnormal
        return Whole(offset, bits.bits(f32.x(e.type.lanes)))


class Pairs6(NamedTuple):
    """Q4_K, Q5_K: d and dmin, then eight pairs of a scale and a minimum, six bits each.

    Four dwords: d | dmin << 16, and of the twelve bytes that `gguf.kquants.Q4_K` draws
    low = EEAAAAAA.., middle = eeaaaaaa.., nibbles = eeeeEEEE..
    """

    fields: tuple[Field, ...] = (Field(0, i32, 4),)

    def terms(self, k: Builder, header: Header, b: Index, offset: int) -> Terms:
        late, byte = b // 4, 8 * (b % 4)  # blocks 4..7 have their low four bits in `nibbles`
        top = byte + 4 + 2 * late
        low = shift(header.word(0, 1 + 2 * late), byte) & 15
        sc = low | (shift(header.word(0, 1), top) & 3) << 4
        low = shift(header.word(0, 2 + late), byte + 4 * late) & 15
        m = low | (shift(header.word(0, 2), top) & 3) << 4
        both = header.word(0, 0)
        # Both products are exact: 11 bits by six.
        return Whole(offset, half(both) * sc.to(f32), -half(both >> 16) * m.to(f32))


class Bytes8(NamedTuple):
    """Q6_K: sixteen scales of eight bits, and d."""

    fields: tuple[Field, ...] = (Field(208, i16), Field(192, i32, 4))

    def terms(self, k: Builder, header: Header, b: Index, offset: int) -> Terms:
        pair = shift(header.word(1, b // 2), 16 * (b % 2))
        sc = (pair << 24).sar(24), (pair << 16).sar(24)
        return Halves(offset, half(header.word(0)), sc)


class Nibbles4(NamedTuple):
    """Q2_K: sixteen bytes of a scale and a minimum, four bits each, and d | dmin << 16."""

    fields: tuple[Field, ...] = (Field(80, i32), Field(0, i32, 4))

    def terms(self, k: Builder, header: Header, b: Index, offset: int) -> Terms:
        pair = shift(header.word(1, b // 2), 16 * (b % 2))
        both = header.word(0)
        minimum = Minimum(-half(both >> 16), ((pair >> 4) & 15, (pair >> 12) & 15))
        return Halves(offset, half(both), (pair & 15, (pair >> 8) & 15), minimum)


class Split6(NamedTuple):
    """Q3_K: sixteen scales of six bits, less 32, and d: the last 14 bytes of the group.

    Read as four dwords from two bytes before (so that none lies past the group's end), the bytes
    are   - - n0 n1 | n2 .. n5 | n6 n7 h0 h1 | h2 h3 d d   with scale i in nibble i / 8 of byte
    n[i % 8] and pair i / 4 of byte h[i % 4].
    """

    fields: tuple[Field, ...] = (Field(94, i32, 4),)

    def terms(self, k: Builder, header: Header, b: Index, offset: int) -> Terms:
        # Scales 2 b and 2 b + 1 lie in neighbouring bytes of one dword.
        nibbles = shift(header.word(0, (b % 4 + 1) // 2), 16 * ((b % 4 + 1) % 2) + 4 * (b // 4))
        pairs = shift(header.word(0, 2 + b % 2), 16 * ((b + 1) % 2) + 2 * (b // 2))
        six = (nibbles & 0x0F0F) | (pairs & 0x0303) << 4
        sc = (six & 63) - 32, (six >> 8) - 32
        return Halves(offset, half(header.word(0, 3) >> 16), sc)


class Nibbles6(NamedTuple):
    """IQ4_XS: d | high pairs << 16, and eight low nibbles; scales less 32."""

    fields: tuple[Field, ...] = (Field(0, i32, 2),)

    def terms(self, k: Builder, header: Header, b: Index, offset: int) -> Terms:
        first = header.word(0, 0)
        low = shift(header.word(0, 1), 4 * b) & 15
        sc = (low | (shift(first, 16 + 2 * b) & 3) << 4) - 32
        return Whole(offset, half(first) * sc.to(f32))


def half(word: Value) -> Value:
    """The low 16 bits as a half, widened to f32."""
    return word.to(i16).bits(f16.x(word.type.lanes)).to(f32)


def shift(word: Value, amount: Index) -> Value:
    """word >> amount, one amount for all lanes."""
    if isinstance(amount, Value):
        amount = amount.to(i32)
        if word.type.lanes:
            amount = amount.splat(word.type.lanes)
    return word >> amount
