"""Rows of a weight matrix as they lie in the file, read several at a time.

`Rows` puts one row or four side by side, each in its own 128-bit lane; `PanelRows` is the 16 rows
of a panel as four such quads. Quad j holds the rows j, j + 4, j + 8, j + 12: in this order
unpacking instructions, which stay inside 128-bit lanes, transpose them into lanes = rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ignis.kernels.lang import Builder, Type, Value, i8, i16, i32, i64

ROWS = 16  # rows of a panel: the lanes of an f32 vector

Index: TypeAlias = "int | Value"
"""A number known while the kernel is built, or only when it runs."""


class Rows:
    """One row or four, each in a 128-bit lane of what is read."""

    def __init__(self, k: Builder, pointers: Sequence[Value]) -> None:
        self.k, self._pointers = k, pointers

    def bytes(self, at: Index) -> Value:
        """16 bytes of each row, from offset `at` on."""
        return self._join([row.at(at).load(i8.x(16)) for row in self._pointers])

    def dword(self, at: Index) -> Value:
        """4 bytes of each row, four times over in its lane."""
        return self._repeated(at, i32)

    def qword(self, at: Index) -> Value:
        """8 bytes of each row, twice over in its lane."""
        return self._repeated(at, i64)

    def numbers(self, read: Callable[[Value], Sequence[Value]]) -> Value:
        """What `read` finds in each row, 16 bytes of numbers, side by side in its lane."""
        return self._join([self._vector(read(row)) for row in self._pointers])

    def _repeated(self, at: Index, type_: Type) -> Value:
        times = 16 // type_.nbytes
        return self._join(
            [row.at(at).load(type_).splat(times).bits(i8.x(16)) for row in self._pointers]
        )

    def _vector(self, numbers: Sequence[Value]) -> Value:
        vector = self.k.const(numbers[0].type.x(len(numbers)), 0)
        for i, number in enumerate(numbers):
            vector = self.k.insert(vector, i, number)
        return vector.bits(i8.x(16))

    def _join(self, parts: list[Value]) -> Value:
        while len(parts) > 1:
            parts = [self.k.concat(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]


class PanelRows:
    """The 16 rows of a panel, a pointer each."""

    def __init__(self, k: Builder, pointers: Sequence[Value]) -> None:
        assert len(pointers) == ROWS
        self.k, self._pointers = k, pointers
        self.quads = [Rows(k, pointers[j::4]) for j in range(4)]

    def at(self, offset_bytes: Value) -> PanelRows:
        return PanelRows(self.k, [row.at(offset_bytes) for row in self._pointers])

    def gather(self, at: int, type_: Type) -> Value:
        """One number of each row; lanes are rows."""
        numbers = self.k.const(type_.x(ROWS), 0)
        for index, row in enumerate(self._pointers):
            numbers = self.k.insert(numbers, index, row.at(at).load(type_))
        return numbers

    def dwords(self, at: int) -> list[Value]:
        """16 bytes of each row as four vectors of dwords; lanes are rows."""
        return transpose_dwords(self.k, [quad.bytes(at) for quad in self.quads])


def transpose_dwords(k: Builder, quads: Sequence[Value]) -> list[Value]:
    """Four quads of 4 dwords a row -> 4 vectors of 16 dwords, vector j dword j of each row."""
    wide = [quad.bits(i32.x(ROWS)) for quad in quads]
    low = [_unpack(k, wide[0], wide[1], 0), _unpack(k, wide[2], wide[3], 0)]
    high = [_unpack(k, wide[0], wide[1], 2), _unpack(k, wide[2], wide[3], 2)]
    return [
        _unpack_pairs(k, low[0], low[1], 0), _unpack_pairs(k, low[0], low[1], 1),
        _unpack_pairs(k, high[0], high[1], 0), _unpack_pairs(k, high[0], high[1], 1),
    ]  # fmt: skip


def transpose(k: Builder, rows: Sequence[Value]) -> list[Value]:
    """Vectors of as many lanes as there are vectors: vector i of lanes j -> vector j of lanes i."""
    n = distance = len(rows)
    vectors = list(rows)
    while distance > 1:
        distance //= 2
        low = [i if not i & distance else n + i - distance for i in range(n)]
        high = [i + distance if not i & distance else n + i for i in range(n)]
        for a in (i for i in range(n) if not i & distance):
            pair = vectors[a], vectors[a + distance]
            vectors[a], vectors[a + distance] = k.shuffle(*pair, low), k.shuffle(*pair, high)
    return vectors


def sum_quarters(k: Builder, quads: Sequence[Value]) -> Value:
    """Four quads of 4 numbers (i32) a row -> the 16 row sums; lanes are rows."""
    first = _unpack(k, quads[0], quads[1], 0) + _unpack(k, quads[0], quads[1], 2)
    second = _unpack(k, quads[2], quads[3], 0) + _unpack(k, quads[2], quads[3], 2)
    return _unpack_pairs(k, first, second, 0) + _unpack_pairs(k, first, second, 1)


def repeat(k: Builder, v: Value, times: int) -> Value:
    """The lanes of `v`, `times` over."""
    return k.shuffle(v, v, list(range(v.type.lanes)) * times)


def shift_bytes(v: Value, n_bits: Index) -> Value:
    """Bytes shifted right (left where `n_bits` is a negative number), as 16-bit words.

    There are no shifts of bytes: bits of the neighbour come in, so mask what must be zero.
    """
    words = v.bits(i16.x(v.type.lanes // 2))
    if isinstance(n_bits, Value):
        return (words >> n_bits.to(i16).splat(words.type.lanes)).bits(v.type)
    return (words >> n_bits if n_bits >= 0 else words << -n_bits).bits(v.type)


def _unpack(k: Builder, a: Value, b: Value, first: int) -> Value:
    """[a0, b0, a1, b1] of dwords `first` and `first + 1` in every 128-bit lane."""
    indices = [
        4 * lane + first + i + 16 * side for lane in range(4) for i in (0, 1) for side in (0, 1)
    ]
    return k.shuffle(a, b, indices)


def _unpack_pairs(k: Builder, a: Value, b: Value, which: int) -> Value:
    """The same for 64-bit pairs of dwords: [a.pair, b.pair] in every 128-bit lane."""
    indices = [
        4 * lane + 2 * which + i + 16 * side
        for lane in range(4) for side in (0, 1) for i in (0, 1)
    ]  # fmt: skip
    return k.shuffle(a, b, indices)
