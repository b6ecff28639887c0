"""How many accumulators a product of a few rows with vectors keeps in the processor's registers.

A tile is `rows` numbers times `width` vectors of 16 lanes: an accumulator for each pair. The
vectors stay in registers while the numbers pass through one more.

    registers        tile         of accumulators   loads
    32 of 512 bits   6 rows x 4   24                10
    16 of 256 bits   6 rows x 1   12                8
    32 of 128 bits   6 rows x 1   24                10
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ignis.kernels.lang import Builder

LANES = 16
_MOST_ROWS = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, and vectors of 16 lanes, whose products are summed at once."""

    rows: int
    width: int


def best_tile(k: Builder, widths: Iterable[int]) -> Tile:
    """The tile of one of these widths that makes the most of what it loads."""
    tiles = [Tile(rows, width) for width in widths for rows in range(1, _MOST_ROWS + 1)]
    return max((tile for tile in tiles if _fits(k, tile)), key=lambda tile: _reuse(k, tile))


def divisors(n: int) -> list[int]:
    """Widths that cut so many vectors evenly."""
    return [width for width in range(1, n + 1) if n % width == 0]


def _registers(k: Builder, width: int) -> int:
    return width * max(1, LANES // k.vector_lanes)


def _fits(k: Builder, tile: Tile) -> bool:
    return (tile.rows + 1) * _registers(k, tile.width) + 1 <= k.vector_registers


def _reuse(k: Builder, tile: Tile) -> float:
    """Products for each load."""
    vectors = _registers(k, tile.width)
    return tile.rows * vectors / (tile.rows + vectors)
