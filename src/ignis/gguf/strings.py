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
_SEARCHED_NBYTES = 1 << 17  # at a time: what is found stays in the cache


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
    prefixes = _short_prefixes(data, start, count)
    if prefixes is None:
        prefixes = _walk(buffer, len(data), start, count)
    lengths = np.diff(prefixes) - _PREFIX.size
    offsets = prefixes[:-1] + _PREFIX.size
    lengths.flags.writeable = offsets.flags.writeable = False
    return StringArray(data, offsets, lengths), int(prefixes[-1])


def _short_prefixes(
    data: NDArray[np.uint8], start: int, count: int
) -> NDArray[np.int64] | None:
    """Where the prefixes start, and the end, if every string has 1 to 255 bytes.

    A prefix then ends in seven zero bytes, which text has not. So all such places are found at
    once, without a step for each string. That each string ends where the next prefix starts proves
    them right; else the answer is None.
    """
    found: list[NDArray[np.int64]] = []
    n_found, at = 0, start
    while n_found < count and at < len(data):
        zero = data[at + 1 : at + _SEARCHED_NBYTES + 7] == 0
        two = zero[:-1] & zero[1:]
        four = two[:-2] & two[2:]
        found.append(np.flatnonzero(four[:-3] & four[3:]) + at)
        n_found += len(found[-1])
        at += _SEARCHED_NBYTES
    if n_found < count or count == 0:
        return None
    prefixes = np.empty(count + 1, np.int64)
    prefixes[:-1] = np.concatenate(found)[:count]
    sizes = data[prefixes[:-1]].astype(np.int64) + _PREFIX.size
    prefixes[-1] = prefixes[-2] + sizes[-1]
    is_chain = prefixes[0] == start and np.array_equal(np.diff(prefixes), sizes)
    return prefixes if is_chain and prefixes[-1] <= len(data) else None


def _walk(buffer: mmap | bytes, size: int, start: int, count: int) -> NDArray[np.int64]:
    """The same by a step for each string, however long. Raises StringWalkError."""
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
    return np.frombuffer(positions, dtype=np.int64)
