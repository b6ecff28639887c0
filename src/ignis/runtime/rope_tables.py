"""Sines and cosines of rope, by position: f32 [n_ctx][2][n_rot/2], filled as sequences grow."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.graph.ir.rope import UNSCALED, RopeScaling, rope_frequencies, rope_table
from ignis.runtime.memory import Memory

_BLOCK = 256  # positions that are computed together


class RopeTable:
    """One table for all layers that share base, width and factors."""

    def __init__(
        self, base: float, n_rot: int, factors: NDArray[Any] | None, n_ctx: int,
        scaling: RopeScaling = UNSCALED,
    ) -> None:  # fmt: skip
        self._frequencies = rope_frequencies(base, n_rot, factors, scaling)
        self._magnitude = scaling.magnitude
        rows = -(-n_ctx // _BLOCK) * _BLOCK
        self._memory = Memory(rows * n_rot * 4)
        self._rows = self._memory.view(np.float32, rows * n_rot).reshape(rows, 2, n_rot // 2)
        self._filled = 0

    @property
    def address(self) -> int:
        return self._memory.address

    @property
    def n_filled(self) -> int:
        """Positions whose rows are there."""
        return self._filled

    def reserve(self, n_positions: int) -> None:
        """Compute the rows of positions below `n_positions`."""
        while self._filled < n_positions:
            block = slice(self._filled, self._filled + _BLOCK)
            positions = np.arange(block.start, block.stop)
            cos, sin = rope_table(positions, self._frequencies, self._magnitude)
            self._rows[block, 0], self._rows[block, 1] = cos, sin
            self._filled = block.stop
