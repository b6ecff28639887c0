"""Products of a few numbers with a few vectors, summed in the processor's registers.

A tile is `rows` numbers times `width` vectors of 16 lanes: an accumulator for each pair. Of numbers
and vectors, whichever take fewer registers stay there while the others pass through one more.

    registers        a tile         of accumulators   loads
    32 of 512 bits   6 rows x 4     24                10
    16 of 256 bits   3 rows x 2     12                7
    32 of 128 bits   6 rows x 1     24                10
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ignis.kernels.lang import Builder, Value, Variable, f32

LANES = 16
_MOST_ROWS = 8


class Tile(NamedTuple):
    """Rows, and vectors of 16 lanes, whose products are summed at once."""

    rows: int
    width: int


def best_tile(k: Builder, widths: Iterable[int]) -> Tile:
    """The tile of one of these widths that makes the most of what it loads."""
    tiles = [Tile(rows, width) for width in widths for rows in range(1, _MOST_ROWS + 1)]
    return max((tile for tile in tiles if _fits(k, tile)), key=lambda tile: _reuse(k, tile))


def widest_tiles(
    k: Builder, n_rows: int, widths: Sequence[int]
) -> list[tuple[range, int]]:
    """Rows in parts as large as fit with one vector, and for each the widest tile that fits."""
    most = max(rows for rows in range(1, n_rows + 1) if rows == 1 or _fits(k, Tile(rows, 1)))
    parts = [range(first, min(first + most, n_rows)) for first in range(0, n_rows, most)]
    return [
        (rows, max(w for w in widths if w == min(widths) or _fits(k, Tile(len(rows), w))))
        for rows in parts
    ]


def divisors(n: int) -> list[int]:
    """Widths that cut so many vectors evenly."""
    return [width for width in range(1, n + 1) if n % width == 0]


class Sums:
    """The accumulators of a tile, a register each.

    A compiler that must halve vectors of 16 lanes by itself holds more of them than there are
    registers.
    """

    def __init__(self, k: Builder, initial: Sequence[Sequence[Value]]) -> None:
        """Begin with vectors of 16 lanes, as many a row as the tile is wide."""
        self.k, self.lanes = k, min(LANES, k.vector_lanes)
        self._rows: list[list[Variable]] = [
            [k.var(register) for register in self._cut(row)] for row in initial
        ]

    def add(
        self, numbers: Sequence[Value], vectors: Sequence[Value],
        where: Sequence[Value] | None = None,
    ) -> None:  # fmt: skip
        """Add each row's number, f32 at an address, times each vector; maybe `where` it holds."""
        registers = self._cut(vectors)
        pairs = [(r, i) for r in range(len(numbers)) for i in range(len(registers))]
        factors: dict[int, Value] = {}
        if len(numbers) < len(registers):
            pairs.sort(key=lambda pair: pair[1])
            factors = {r: self._factor(number) for r, number in enumerate(numbers)}
        for r, i in pairs:
            if r not in factors:
                factors[r] = self._factor(numbers[r])
            chain = self._rows[r][i]
            total = self.k.fma(factors[r], registers[i], chain.get())
            chain.set(self.k.select(where[r], total, chain.get()) if where else total)

    def get(self) -> list[list[Value]]:
        """The sums as vectors of 16 lanes, as many a row as the tile is wide."""
        each = LANES // self.lanes
        return [
            [self._join([cell.get() for cell in row[i : i + each]])
             for i in range(0, len(row), each)]
            for row in self._rows
        ]  # fmt: skip

    def _factor(self, number: Value) -> Value:
        return number.load(f32).splat(self.lanes)

    def _cut(self, vectors: Iterable[Value]) -> list[Value]:
        bounds = range(0, LANES, self.lanes)
        return [
            self.k.shuffle(vector, vector, list(range(first, first + self.lanes)))
            for vector in vectors
            for first in bounds
        ]

    def _join(self, registers: list[Value]) -> Value:
        while len(registers) > 1:
            pairs = zip(registers[::2], registers[1::2], strict=True)
            registers = [self.k.concat(low, high) for low, high in pairs]
        return registers[0]


def _registers(k: Builder, width: int) -> int:
    return width * max(1, LANES // k.vector_lanes)


def _fits(k: Builder, tile: Tile) -> bool:
    vectors = _registers(k, tile.width)
    return tile.rows * vectors + min(tile.rows, vectors) + 1 <= k.vector_registers


def _reuse(k: Builder, tile: Tile) -> float:
    """Products for each load."""
    vectors = _registers(k, tile.width)
    return tile.rows * vectors / (tile.rows + vectors)
