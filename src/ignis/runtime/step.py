"""A step is a batch of tokens, each with a slot and a position; here it meets native memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignis.graph.ir.types import align
from ignis.kernels.segments import SEGMENT
from ignis.runtime.memory import Memory


class StepBatch(NamedTuple):
    """T tokens and where they stand; `logit_rows` are the R indices that need logits.

    Tokens of one slot stand in ascending position, each one behind all that its slot holds.
    """

    ids: Sequence[int]
    slots: Sequence[int]
    positions: Sequence[int]
    logit_rows: Sequence[int]


class StepTables:
    """Native tables of a step, at addresses that compiled plans can rely on."""

    def __init__(self, max_tokens: int, max_logits: int) -> None:
        self.max_tokens, self.max_logits = max_tokens, max_logits
        counts = dict.fromkeys(("ids", "slots", "positions", "rows"), max_tokens)
        counts["logit_rows"] = max_logits
        self._views: dict[str, NDArray[np.int32]] = {}
        self._address: dict[str, int] = {}
        self._memory = Memory(sum(align(4 * count) for count in counts.values()))
        offset = 0
        for name, count in counts.items():
            self._views[name] = self._memory.view(np.int32, count, offset)
            self._address[name] = self._memory.address + offset
            offset += align(4 * count)
        self._views["rows"][:] = np.arange(max_tokens)

    def address(self, name: str) -> int:
        """`ids`, `slots`, `positions`: i32 a token; `rows`: 0, 1, 2, ...; `logit_rows`: i32 a row.

        Kernels that select rows read `rows` or `logit_rows`.
        """
        return self._address[name]

    def fill(self, batch: StepBatch) -> dict[str, int]:
        """Write the batch and return the counts that launches name: T, R and S.

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
            "S": max(batch.positions) // SEGMENT + 1,
        }

    def _put(self, name: str, values: Sequence[Any]) -> None:
        self._views[name][: len(values)] = values
