"""Memory for native code: page-aligned, zeroed, committed by the system as it is touched."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Reserved, not committed: a cache for a long context costs what is used of it.
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


class Memory:
    """An anonymous mapping of `nbytes` (at least one page).

    `address` is stable for the object's life, and every view keeps the mapping alive.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, mmap.PAGESIZE)
        self._map = mmap.mmap(-1, self.nbytes, flags=_FLAGS)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def view(self, dtype: Any, count: int, offset_bytes: int = 0) -> NDArray[Any]:
        """`count` items of `dtype` at an offset, sharing the memory."""
        itemsize = np.dtype(dtype).itemsize
        return self.bytes[offset_bytes : offset_bytes + count * itemsize].view(dtype)


def align(nbytes: int, to: int = 64) -> int:
    """Round up to a multiple."""
    return -(-nbytes // to) * to
