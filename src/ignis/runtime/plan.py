"""The compiled plan as data: what the native walker reads, patched with each step's counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.native.library import Library
from ignis.runtime.launches import Launch, Private
from ignis.runtime.schedule import Timetable

_CHUNKS_PER_THREAD = 8  # small enough that a late thread costs an eighth of its share at most

# The part of shared work that threads divide beforehand. Of a stream of weights, most: where they
# take turns, each one's prefetcher fetches what the other will read. Of a prompt's matmul, enough
# for its activations not to be read anew for each chunk. None of what is released behind its last
# chunk: the workers that begin to pack would leave the caller's part to the end.
_OWN_EIGHTHS_OF_STREAMS = 7
_OWN_EIGHTHS = 5

_RECORD_WORDS = 16
_KERNEL, _ARGS, _UNITS, _CHUNK, _COUNTER, _ARGS_STRIDE, _REPEATED, _BARRIER, _OWN = range(9)
_RELEASE = slice(9, 11)

ONE_ROW: Mapping[str, int] = MappingProxyType({"T": 1, "R": 1, "S": 1})
"""The counts for launches outside a model's step, which name none."""


class CompiledPlan:
    """Records and argument words of a list of launches.

    Arguments that are `Private` differ from thread to thread: such a launch has a copy of its
    words for each. `private` is the memory of thread 0, the others' follow `stride` bytes apart.
    """

    def __init__(
        self, launches: Sequence[Launch], library: Library, n_threads: int,
        timetable: Timetable | None = None, private: int = 0, stride: int = 0,
    ) -> None:  # fmt: skip
        self.launches = tuple(launches)
        self._n_threads, self._private, self._stride = n_threads, private, stride
        self.records: NDArray[np.int64] = np.zeros((len(launches), _RECORD_WORDS), np.int64)
        copies = [
            n_threads if any(isinstance(a, Private) for a in launch.args.values()) else 1
            for launch in launches
        ]
        sizes = [len(x.kernel.params) * n for x, n in zip(launches, copies, strict=True)]
        starts = np.cumsum([0, *sizes])
        self._words = np.zeros(int(starts[-1]), np.int64)
        first_word = self._words.ctypes.data  # asked for once: `ctypes` makes an object each time
        self._patched: dict[str, Any] = {}
        for index, launch in enumerate(launches):
            start, n_params = int(starts[index]), len(launch.kernel.params)
            for thread in range(copies[index]):
                self._write(launch, start + thread * n_params, thread)
            record = self.records[index]
            record[_KERNEL] = library.address(launch.kernel)
            record[_ARGS] = first_word + 8 * start
            record[_ARGS_STRIDE] = 8 * n_params if copies[index] > 1 else 0
            record[_REPEATED] = timetable is not None and timetable.repeated[index]
            record[_BARRIER] = timetable is None or timetable.barrier_after(index)
            record[_RELEASE] = launch.release
        self._patched = {name: np.array(places) for name, places in self._patched.items()}
        self._units = np.array([launch.units for launch in launches], np.int64)
        self._grains = np.array([launch.grain for launch in launches], np.int64)
        # With their types said: there may be no launch at all.
        self._shared = np.array([launch.shared for launch in launches], np.bool_)
        self._per = {
            name: np.array([name in (launch.per, launch.gate) for launch in launches], np.bool_)
            for name in ("T", "R", "S")
        }
        self._gated = np.array([launch.gate is not None for launch in launches], np.bool_)
        self._counts: Mapping[str, int] = {}

    def _write(self, launch: Launch, start: int, thread: int) -> None:
        """Write one copy of a launch's words; counts are filled in by `set_counts`."""
        for position, (name, type_) in enumerate(launch.kernel.params, start):
            argument = launch.args[name]
            if isinstance(argument, str):
                self._patched.setdefault(argument, []).append(position)
            elif isinstance(argument, Private):
                self._words[position] = self._private + thread * self._stride + argument.offset
            elif type_.kind == "f":  # an f32: the only float that kernels take
                self._words[position] = int(np.float32(argument).view(np.int32))
            elif argument is not None:
                self._words[position] = int(argument)

    def set_counts(self, counts: Mapping[str, int]) -> None:
        """Write a step's counts (T, R and S) into the records and arguments."""
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
        fair = -(-units // self._n_threads)
        least = np.maximum(np.minimum(self._grains, fair), 1)
        chunks = np.maximum(units // (self._n_threads * _CHUNKS_PER_THREAD), least)
        streams = self._shared & (self._grains > 0)
        self.records[:, _CHUNK] = np.where(self._shared, np.where(streams, least, chunks), 0)
        eighths = np.where(streams, _OWN_EIGHTHS_OF_STREAMS, _OWN_EIGHTHS)
        own = units * eighths // (8 * self._n_threads)
        is_released = self.records[:, _RELEASE].any(axis=1)
        self.records[:, _OWN] = np.where(self._shared & ~is_released, own, 0)

