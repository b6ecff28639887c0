"""The compiled plan as data: what the native walker reads, patched with each step's counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ignis.kernels.lang import f32
from ignis.native.library import Library
from ignis.runtime.launches import Argument, Launch

_CHUNKS_PER_THREAD = 8  # small enough that a late thread costs an eighth of its share at most

_RECORD_WORDS = 8
_KERNEL, _ARGS, _UNITS, _CHUNK = range(4)


class CompiledPlan:
    """Records and argument words of a list of launches."""

    def __init__(self, launches: Sequence[Launch], library: Library, n_threads: int) -> None:
        self.launches = tuple(launches)
        self._n_threads = n_threads
        self.records: NDArray[np.int64] = np.zeros((len(launches), _RECORD_WORDS), np.int64)
        sizes = [len(launch.kernel.params) for launch in launches]
        starts = np.cumsum([0, *sizes])
        self._words = np.zeros(int(starts[-1]), np.int64)
        patched: dict[str, list[int]] = {}
        for index, launch in enumerate(launches):
            start = int(starts[index])
            for position, (name, type_) in enumerate(launch.kernel.params, start):
                argument = launch.args[name]
                if isinstance(argument, str):
                    patched.setdefault(argument, []).append(position)
                else:
                    self._words[position] = _word(argument, is_float=type_ == f32)
            self.records[index, _KERNEL] = library.address(launch.kernel)
            self.records[index, _ARGS] = self._words.ctypes.data + 8 * start
        self._patched = {name: np.array(places) for name, places in patched.items()}
        self._units = np.array([launch.units for launch in launches], np.int64)
        self._shared = np.array([launch.shared for launch in launches])
        self._per = {
            name: np.array([name in (launch.per, launch.gate) for launch in launches])
            for name in ("T", "R")
        }
        self._gated = np.array([launch.gate is not None for launch in launches])
        self._counts: Mapping[str, int] = {}

    def set_counts(self, counts: Mapping[str, int]) -> None:
        """Write a step's counts (T, R and their tiles) into the records and arguments."""
        if counts == self._counts:
            return
        self._counts = dict(counts)
        for name, places in self._patched.items():
            self._words[places] = counts[name]
        units = self._units.copy()
        for name, concerned in self._per.items():
            factor = np.where(self._gated, min(counts[name], 1), counts[name])
            units = np.where(concerned, units * factor, units)
        self.records[:, _UNITS] = units
        chunks = np.maximum(units // (self._n_threads * _CHUNKS_PER_THREAD), 1)
        self.records[:, _CHUNK] = np.where(self._shared, chunks, 0)


def _word(argument: Argument, *, is_float: bool) -> int:
    if is_float:
        return int(np.float32(argument).view(np.int32))
    return 0 if argument is None else int(argument)  # type: ignore[arg-type]
