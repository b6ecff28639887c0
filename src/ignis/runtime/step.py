"""A step is a batch of tokens, each with a slot and a position; here it meets native memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.kernels import a8
from ignis.kernels.attention import SEGMENT
from ignis.runtime.memory import Memory, align


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens and where they stand; `logit_rows` are the R indices that need logits.

    Tokens of one slot stand in ascending position, each one behind all that its slot holds.
    """

    ids: Sequence[int]
    slots: Sequence[int]
    positions: Sequence[int]
    logit_rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class RowTables:
    """Addresses of the tables that describe rows of a matrix: the tokens', or the logits'."""

    rows: int  # i32 [n]: the row of the source that each row reads
    tile_of_row: int  # i32 [n][2]: first row and width of the tile that the row lies in
    tiles: int  # i32 [n_tiles][2]: first row and width


class StepTables:
    """Native tables of a step, at addresses that compiled plans can rely on."""

    def __init__(self, max_tokens: int, max_logits: int) -> None:
        self.max_tokens, self.max_logits = max_tokens, max_logits
        names = ("ids", "slots", "positions", "rows", "tile_of_row", "tiles")
        sizes = [max_tokens] * 4 + [2 * max_tokens] * 2
        logit_names = ("logit_rows", "logit_tile_of_row", "logit_tiles")
        logit_sizes = [max_logits, 2 * max_logits, 2 * max_logits]
        self._views: dict[str, NDArray[np.int32]] = {}
        self._address: dict[str, int] = {}
        counts = dict(zip(names + logit_names, sizes + logit_sizes, strict=True))
        self._memory = Memory(sum(align(4 * count) for count in counts.values()))
        offset = 0
        for name, count in counts.items():
            self._views[name] = self._memory.view(np.int32, count, offset)
            self._address[name] = self._memory.address + offset
            offset += align(4 * count)
        self._views["rows"][:] = np.arange(max_tokens)
        self._tiled: dict[str, int] = {}

    def address(self, name: str) -> int:
        """`ids`, `slots` or `positions`: i32 a token."""
        return self._address[name]

    @property
    def tokens(self) -> RowTables:
        return RowTables(*(self._address[n] for n in ("rows", "tile_of_row", "tiles")))

    @property
    def logits(self) -> RowTables:
        names = ("logit_rows", "logit_tile_of_row", "logit_tiles")
        return RowTables(*(self._address[n] for n in names))

    def fill(self, batch: StepBatch) -> dict[str, int]:
        """Write the batch and return the counts that launches name: T, R, their tiles, and S.

        S is the number of attention segments that the longest sequence has.
        """
        n_tokens, n_logits = len(batch.ids), len(batch.logit_rows)
        self._put("ids", batch.ids)
        self._put("slots", batch.slots)
        self._put("positions", batch.positions)
        self._put("logit_rows", batch.logit_rows)
        return {
            "T": n_tokens,
            "R": n_logits,
            "T.tiles": self._tile("", n_tokens),
            "R.tiles": self._tile("logit_", n_logits),
            "S": max(batch.positions) // SEGMENT + 1,
        }

    def _put(self, name: str, values: Sequence[Any]) -> None:
        self._views[name][: len(values)] = values

    def _tile(self, prefix: str, n_rows: int) -> int:
        """Cut rows into tiles, if the last step's cut does not fit; return their number."""
        if self._tiled.get(prefix) != n_rows:
            first = 0
            for index, width in enumerate(a8.tile_widths(n_rows)):
                self._views[prefix + "tiles"][2 * index : 2 * index + 2] = first, width
                each = self._views[prefix + "tile_of_row"][2 * first : 2 * (first + width)]
                each.reshape(-1, 2)[:] = first, width
                first += width
            self._tiled[prefix] = n_rows
        return sum(1 for _ in a8.tile_widths(n_rows))
