"""Unpacking of the IQ formats, whose codes name points of a grid: as in `unpack`, block by block.

The codes that come out are short again: a magnitude's number and a sign bit above it, or, in IQ1, a
digit's double and a bit for the shift. Points are looked up in memory, one row after the other;
signs are spread over vectors. The layouts are drawn in `gguf.iquants`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from ignis.gguf.grids import grid
from ignis.gguf.iquants import IQ2_MAGNITUDES, IQ3_S_MAGNITUDES, IQ3_XXS_MAGNITUDES
from ignis.kernels.lang import Builder, Value, i8, i16, i32, i64
from ignis.kernels.rows import Index, Rows
from ignis.kernels.unpack import Halves, spread_bits


def _signed_bytes(magnitudes: tuple[int, ...], offset: int) -> tuple[int, ...]:
    """The bytes of codes: each magnitude, then each negated, around `offset`; 16 in all."""
    n_codes = 1 << (len(magnitudes) - 1).bit_length()
    padded = magnitudes + (0,) * (n_codes - len(magnitudes))
    both = tuple(offset + m for m in padded) + tuple(offset - m for m in padded)
    return both + (0,) * (16 - len(both))


_IQ1_BYTES = (16 - 9, 16 - 7, 16 - 1, 16 + 1, 16 + 7, 16 + 9, *(0,) * 10)  # eighths
_IQ2_BYTES = _signed_bytes(IQ2_MAGNITUDES, 64)

TABLES = {
    "iq1_s": _IQ1_BYTES, "iq1_m": _IQ1_BYTES, "iq2_xxs": _IQ2_BYTES, "iq2_xs": _IQ2_BYTES,
    "iq2_s": _IQ2_BYTES, "iq3_xxs": _signed_bytes(IQ3_XXS_MAGNITUDES, 64),
    "iq3_s": _signed_bytes(IQ3_S_MAGNITUDES, 16),
}  # fmt: skip
"""The bytes that codes stand for, around the format's offset."""

_SIGN_OF_THREE, _SIGN_OF_FOUR = 4, 8  # of codes of so many bits
_BYTES_OF_ONES = 0x0101010101010101

PointIndex = Callable[[Value, int], Value]
"""The number of the j-th point of a block, from where the row's group starts."""


def iq2_xxs(rows: Rows, b: Index) -> Halves:
    at = 8 * b + 2
    points = _points(rows, "iq2_xxs", lambda row, j: _byte(row, at + j))
    return _signed(rows.k, points, _with_parity(_four_sevens(rows.dword(at + 4))), _SIGN_OF_THREE)


def iq2_xs(rows: Rows, b: Index) -> Halves:
    at = 8 * b + 2
    points = _points(rows, "iq2_xs", lambda row, j: _word(row, at + 2 * j) & 511)
    words = rows.qword(at)
    # The high bytes of four words, four times over in each lane of 16.
    high = rows.k.shuffle(words, words, [i // 16 * 16 + i % 4 * 2 + 1
                                         for i in range(words.type.lanes)])  # fmt: skip
    sevens = (high.bits(i32.x(high.type.lanes // 4)) >> 1) & 0x7F7F7F7F
    return _signed(rows.k, points, _with_parity(sevens), _SIGN_OF_THREE)


def iq2_s(rows: Rows, b: Index) -> Halves:
    def point(row: Value, j: int) -> Value:
        return _byte(row, 4 * b + (2 + j)) | ((_byte(row, b + 66) >> (2 * j) << 8) & 0x300)

    points = _points(rows, "iq2_s", point)
    return _signed(rows.k, points, rows.dword(4 * b + 34), _SIGN_OF_THREE)


def iq3_xxs(rows: Rows, b: Index) -> Halves:
    points = _points(rows, "iq3_xxs", lambda row, j: _byte(row, 8 * b + (2 + j)))
    sevens = _four_sevens(rows.dword(4 * b + 66))
    return _signed(rows.k, points, _with_parity(sevens), _SIGN_OF_FOUR)


def iq3_s(rows: Rows, b: Index) -> Halves:
    def point(row: Value, j: int) -> Value:
        return _byte(row, 8 * b + (2 + j)) | ((_byte(row, b + 66) >> j << 8) & 0x100)

    return _signed(rows.k, _points(rows, "iq3_s", point), rows.dword(4 * b + 74), _SIGN_OF_FOUR)


def iq1_s(rows: Rows, b: Index) -> Halves:
    def point(row: Value, j: int) -> Value:
        return _byte(row, 4 * b + (2 + j)) | ((_word(row, 2 * b + 34) >> (3 * j) << 8) & 0x700)

    def shift(row: Value, j: int) -> Value:
        return _word(row, 2 * b + 34) & 0x8000

    return _points(rows, "iq1_s", point, shift)


def iq1_m(rows: Rows, b: Index) -> Halves:
    def nibble(row: Value, j: int) -> Value:
        return _byte(row, 2 * b + (32 + j // 2)) >> (4 * (j % 2))

    def point(row: Value, j: int) -> Value:
        return _byte(row, 4 * b + j) | ((nibble(row, j) << 8) & 0x700)

    return _points(rows, "iq1_s", point, lambda row, j: nibble(row, j) & 8)


def _points(
    rows: Rows, name: str, index: PointIndex, down: PointIndex | None = None
) -> Halves:  # fmt: skip
    """The points of 32 values; `down` is not zero where IQ1 shifts them down."""
    k, (table, width) = rows.k, _table(name)
    start, type_ = k.data(table), i64 if width == 8 else i32

    def point(row: Value, j: int) -> Value:
        found = start.at(index(row, j) * width).load(type_)
        if down is None:
            return found
        up = k.select(down(row, j) == 0, k.const(i64, _BYTES_OF_ONES), k.const(i64, 0))
        return found | up

    n = 16 // width
    return (
        rows.numbers(lambda row: [point(row, j) for j in range(n)]),
        rows.numbers(lambda row: [point(row, n + j) for j in range(n)]),
    )


@cache
def _table(name: str) -> tuple[bytes, int]:
    """A grid as the bytes that kernels read, a byte a coordinate, and the bytes of a point."""
    digits = grid(name)
    # IQ1: twice the digit; bit 0 is for the shift.
    codes = 2 * digits if name == "iq1_s" else digits
    return codes.astype(np.uint8).tobytes(), digits.shape[1]


def _byte(row: Value, at: Index) -> Value:
    return row.at(at).load(i8).zext(i64)


def _word(row: Value, at: Index) -> Value:
    return row.at(at).load(i16).zext(i64)


def _signed(k: Builder, points: Halves, bits: Value, sign: int) -> Halves:
    """Points with the bit `sign` set in each byte whose bit of the dword `bits` is."""
    first, last = spread_bits(k, bits, sign)
    return points[0] | first, points[1] | last


def _four_sevens(dwords: Value) -> Value:
    """The low 28 bits of each dword as four bytes of seven bits."""
    w = dwords.bits(i32.x(dwords.type.lanes // 4))
    return (
        (w & 0x7F) | ((w << 1) & 0x7F00) | ((w << 2) & 0x7F0000) | ((w << 3) & 0x7F000000)
    )  # fmt: skip


def _with_parity(sevens: Value) -> Value:
    """Bytes of seven bits and an eighth that makes the number of ones even."""
    parity = sevens ^ (sevens >> 4)
    parity = parity ^ (parity >> 2)
    parity = parity ^ (parity >> 1)
    return (sevens | ((parity & 0x01010101) << 7)).bits(i8.x(4 * sevens.type.lanes))
