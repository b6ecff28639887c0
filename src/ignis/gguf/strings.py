"""Arrays of strings as they lie in the file: one shared byte buffer, offsets and lengths.

A vocabulary has 150,000 tokens and as many merges. As Python strings they cost 60 ms and 20 MB
before anyone asks for one, so a `StringArray` keeps only where each string starts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap
from struct import Struct, error
from typing import overload

import numpy as np
from numpy.typing import NDArray

_PREFIX = Struct("<Q")      # each string: its length in bytes (u64), then the bytes


@dataclass(frozen=True, slots=True, eq=False)
class StringArray(Sequence[str]):
    """A read-only sequence of strings, decoded when asked for.

    data     uint8 [file size]: the bytes that `offsets` point into, usually a mapped file
    offsets  int64 [n]: where each string starts in `data`
    lengths  int64 [n]: bytes of each string

    Bytes that are not UTF-8 decode to U+FFFD; `bytes_at` gives them as they are.
    """

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def from_strings(cls, strings: Sequence[str | bytes]) -> StringArray:
        """Pack Python strings, e.g. for a vocabulary that comes from no file.

        >>> list(StringArray.from_strings(["a", "", "ß"]))
        ['a', '', 'ß']
        """
        encoded = [s.encode() if isinstance(s, str) else s for s in strings]
        lengths = np.array([len(s) for s in encoded], dtype=np.int64)
        offsets = np.cumsum(lengths, dtype=np.int64) - lengths
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets, lengths)

    def __len__(self) -> int:
        return len(self.offsets)

    def bytes_at(self, index: int) -> bytes:
        """Return the bytes of string `index`; IndexError if there is none."""
        start = int(self.offsets[index])
        return self.data[start : start + int(self.lengths[index])].tobytes()

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> StringArray: ...
    def __getitem__(self, index: int | slice) -> str | StringArray:
        if isinstance(index, slice):
            return StringArray(self.data, self.offsets[index], self.lengths[index])
        return self.bytes_at(index).decode(errors="replace")

    def iter_bytes(self) -> Iterator[bytes]:
        """Yield the bytes of every string; several times faster than `bytes_at` in a loop."""
        view = self.data.data
        for start, length in zip(self.offsets.tolist(), self.lengths.tolist(), strict=True):
            yield bytes(view[start : start + length])

    def __iter__(self) -> Iterator[str]:
        for item in self.iter_bytes():
            yield item.decode(errors="replace")

    def __repr__(self) -> str:
        return f"StringArray of {len(self)} strings, {int(self.lengths.sum())} bytes"


class StringWalkError(Exception):
    """String `index` does not end inside the buffer; the reader says so with file and key."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def walk_strings(
    buffer: mmap | bytes, data: NDArray[np.uint8], start: int, count: int
) -> tuple[StringArray, int]:
    """Find `count` length-prefixed strings from byte `start`; return them and the end position.

    `buffer` and `data` are the same bytes. The caller has checked that 8 * count bytes are
    there, so that `count` is safe to allocate for. Raises StringWalkError.
    """
    size = len(data)
    positions = array("q", bytes(8 * (count + 1)))
    unpack_from = _PREFIX.unpack_from
    position, index = start, 0
    try:
        for index in range(count):
            positions[index] = position
            position += unpack_from(buffer, position)[0] + 8
    except (error, OverflowError):
        # A length that is too large shows only when the *next* prefix is looked for.
        raise StringWalkError(index - 1 if position > size else index) from None
    if position > size:
        raise StringWalkError(count - 1)
    positions[count] = position
    prefixes = np.frombuffer(positions, dtype=np.int64)
    lengths = np.diff(prefixes) - 8
    offsets = prefixes[:-1] + 8
    lengths.flags.writeable = offsets.flags.writeable = False
    return StringArray(data, offsets, lengths), position
