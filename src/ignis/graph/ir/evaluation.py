"""What an op sees when it is evaluated: the values so far, the step's token table, the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ignis.errors import GraphError
from ignis.graph.ir.kv_types import through_cache
from ignis.graph.ir.operation import Value

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass
class ReferenceCache:
    """Keys and values of every (layer, slot), by position: the effect that attention writes.

    `rounded` rounds what is stored to the type of the cache, as the engine's does.
    """

    rounded: bool = False
    _pages: dict[tuple[int, int], tuple[Array, Array]] = field(default_factory=dict, repr=False)

    def store(
        self, layer: int, slot: int, positions: Integers, keys: Array, vals: Array, kv_type: str
    ) -> None:
        """Write rows [t, K*C] of keys and values at `positions` [t] of one slot."""
        need = int(positions.max()) + 1
        old = self._pages.get((layer, slot))
        pages = tuple(
            _grown(None if old is None else old[i], need, rows.shape[1])
            for i, rows in enumerate((keys, vals))
        )
        for page, rows in zip(pages, (keys, vals), strict=True):
            page[positions] = through_cache(rows, kv_type) if self.rounded else rows
        self._pages[layer, slot] = (pages[0], pages[1])

    def read(self, layer: int, slot: int, n: int) -> tuple[Array, Array]:
        """The first `n` positions' keys and values, [n, K*C]; NaN where none was stored."""
        keys, vals = self._pages[layer, slot]
        return keys[:n], vals[:n]

    def clear(self, slot: int) -> None:
        """Forget all that a slot holds."""
        for key in [key for key in self._pages if key[1] == slot]:
            del self._pages[key]


@dataclass
class Evaluation:
    """One step being interpreted. `step[value]` is an array; ops read no other state."""

    weights: Callable[[str], np.ndarray[Any, Any]]
    cache: ReferenceCache
    positions: Integers
    slots: Integers
    logit_rows: Integers
    exact: bool
    values: dict[Value, Array]

    def __getitem__(self, value: Value) -> Array:
        if not value.is_weight:
            return self.values[value]
        array = np.asarray(self.weights(value.weight_name), dtype=np.float64)
        if array.shape != value.type.shape:
            raise GraphError(
                "a weight's array has the wrong shape",
                where=value,
                got=array.shape,
                wanted=value.type,
            )
        if value.splat is not None and not (array == value.splat).all():
            raise GraphError("a weight is not the constant it is declared to be", where=value,
                             wanted=value.splat)  # fmt: skip
        return array

    def get(self, value: Value | None) -> Array | None:
        """The array of an optional operand, None where it is left out."""
        return None if value is None else self[value]


def _grown(page: Array | None, need: int, width: int) -> Array:
    """A page with room for `need` rows; new rows are NaN, so that reading one is seen."""
    if page is not None and len(page) >= need:
        return page
    grown = np.full((max(need, 2 * (0 if page is None else len(page))), width), np.nan)
    if page is not None:
        grown[: len(page)] = page
    return grown
