"""Memory for native code: page-aligned, zeroed, committed by the system as it is touched."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.graph.ir.types import align

# Reserved, not committed: a cache for a long context costs what is used of it. Linux's number, as
# Python has no name for it before 3.13.
_NORESERVE = 0x4000 if sys.platform.startswith("linux") else 0
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE


class Memory:
    """An anonymous mapping of `nbytes` (at least one page).

    `address` is stable for the object's life, and every view keeps the mapping alive. `huge`: ask
    for huge pages, which cost a stream through the memory fewer address translations; for
    memory that will be filled, as the system commits it 2 MiB at a time.
    """

    def __init__(self, nbytes: int, *, huge: bool = False) -> None:
        self.nbytes = max(nbytes, mmap.PAGESIZE)
        self._map = mmap.mmap(-1, self.nbytes, flags=_FLAGS)
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel that was built without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def view(self, dtype: Any, count: int, offset_bytes: int = 0) -> NDArray[Any]:
        """`count` items of `dtype` at an offset, sharing the memory."""
        itemsize = np.dtype(dtype).itemsize
        return self.bytes[offset_bytes : offset_bytes + count * itemsize].view(dtype)


def drop_pages(address: int, nbytes: int) -> None:
    """Let the system drop the whole pages of a mapped file there; read again if touched."""
    first, nbytes = whole_pages(address, nbytes)
    if nbytes:
        # By libc: the mapping is held by NumPy, which has no such call.
        start, length = ctypes.c_void_p(first), ctypes.c_size_t(nbytes)
        _libc().madvise(start, length, mmap.MADV_DONTNEED)


def whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """Address and bytes of the whole pages in a stretch of memory."""
    first = align(address, mmap.PAGESIZE)
    last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return first, max(last - first, 0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def thread_stride(nbytes: int) -> int:
    """How far apart threads' own memories of that size lie: a page and a bit behind each other.

    Streams a power of two apart would share cache sets.
    """
    return align(nbytes, mmap.PAGESIZE) + mmap.PAGESIZE + 192
