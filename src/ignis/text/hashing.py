"""Hash tables over NumPy arrays, built and probed for whole vocabularies at once.

A Python dictionary of a 150,000-token vocabulary with its merges costs tens of megabytes and a
second to build; these tables cost a few megabytes and some milliseconds. Both use open addressing
with linear probing at a load of at most two thirds, the layout that the native merge loop reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
I32 = NDArray[np.int32]

# Odd constants with well-mixed bits (the golden ratio, and a prime of xxHash).
MULTIPLIER = 0x9E3779B97F4A7C15
SECOND_MULTIPLIER = 0xC2B2AE3D27D4EB4F
_KEEP = np.array([(1 << (8 * n)) - 1 for n in range(9)], np.uint64)  # the low n bytes of a word
_BLOCK = 1 << 15


class Spans:
    """Many byte strings in one buffer, read eight bytes at a time at any offset."""

    def __init__(self, data: NDArray[np.uint8], offsets: I64, lengths: I64) -> None:
        begin = int(offsets.min(initial=data.size))
        end = int((offsets + lengths).max(initial=begin))
        # The last string is read in whole words too, so some bytes must follow it.
        region = data[begin : end + 16]
        missing = 16 - (region.size - (end - begin))
        if missing > 0:
            region = np.concatenate([region, np.zeros(missing, np.uint8)])
        self.bytes, self.offsets, self.lengths = region, offsets - begin, lengths
        self.words: U64 = np.ndarray((region.size - 7,), "<u8", buffer=region, strides=(1,))

    @classmethod
    def of(cls, strings: Sequence[bytes]) -> Spans:
        lengths = np.fromiter(map(len, strings), np.int64, len(strings))
        data = np.frombuffer(b"".join(strings), np.uint8)
        return cls(data, np.cumsum(lengths) - lengths, lengths)

    def hashes(self) -> U64:
        """A 64-bit hash of each string."""
        result = np.empty(self.offsets.size, np.uint64)
        for part in blocks(result.size):
            result[part] = self._hash(self.offsets[part], self.lengths[part], None)
        return result

    def hashes_of(self, offsets: I64, lengths: I64) -> U64:
        """Hashes of parts of the buffer."""
        return self._hash(offsets, lengths, None)

    def hashes_without(self, offsets: I64, lengths: I64, gaps: I64) -> U64:
        """Hashes of parts of the buffer, the byte at index `gaps` of each left out."""
        return self._hash(offsets, lengths - 1, gaps)

    def _hash(self, offsets: I64, lengths: I64, gaps: I64 | None) -> U64:
        result: U64 = lengths.astype(np.uint64) * np.uint64(SECOND_MULTIPLIER)
        active: Any = slice(None)
        position = 0
        while True:
            o, n = offsets[active] + position, lengths[active] - position
            word = self.words[o]
            if gaps is not None:
                # Before the gap bytes lie where they lie, after it one further on.
                keep = _KEEP[np.clip(gaps[active] - position, 0, 8)]
                word = (word & keep) | (self.words[o + 1] & ~keep)
            word &= _KEEP[np.minimum(n, 8)]
            result[active] = mix(result[active] ^ word)
            position += 8
            active = np.flatnonzero(lengths > position) if position == 8 else active[n > 8]
            if not active.size:
                return result


def blocks(n: int) -> Iterator[slice]:
    """Cut n items into blocks small enough for temporaries to stay in the cache."""
    return (slice(begin, begin + _BLOCK) for begin in range(0, n, _BLOCK))


def mix(x: U64) -> U64:
    """One round of multiply and fold; a bijection on 64 bits."""
    x = x * np.uint64(MULTIPLIER)
    x ^= x >> np.uint64(32)
    return x * np.uint64(SECOND_MULTIPLIER)


def table_bits(n_keys: int) -> int:
    """Log2 of the number of slots for `n_keys` keys."""
    return max(4, (3 * n_keys // 2).bit_length())


def place(keys: U64, slots: I64, n_bits: int) -> I32:
    """Put each key's index into a table of 2^n_bits slots, from its first slot onward.

    The first of equal keys stays, the others are left out. Returns the table; -1 is empty.
    """
    table = np.full(1 << n_bits, -1, np.int32)
    mask = (1 << n_bits) - 1
    pending = np.arange(keys.size, dtype=np.int32)
    while pending.size:
        free = table[slots] < 0
        # Of several keys that want one free slot the lowest index gets it: it is written last.
        table[slots[free][::-1]] = pending[free][::-1]
        settled = keys[table[slots]] == keys[pending]
        pending, slots = pending[~settled], (slots[~settled] + 1) & mask
    return table


class HashIndex:
    """Finds the index of a 64-bit hash among the hashes it was built from.

    `table` has 2^n_bits entries, each an index or -1; a hash's first slot is its top `n_bits` bits,
    the next ones follow, wrapping around.
    """

    def __init__(self, hashes: U64) -> None:
        self.hashes = hashes
        self.n_bits = table_bits(2 * hashes.size)  # four bytes a slot: room is cheap
        self.table = place(hashes, self._first_slots(hashes), self.n_bits)

    def _first_slots(self, hashes: U64) -> I64:
        return (hashes >> np.uint64(64 - self.n_bits)).astype(np.int64)

    def find(self, hashes: U64) -> I32:
        """The index of each hash, or -1."""
        if not self.hashes.size:
            return np.full(hashes.size, -1, np.int32)
        mask = (1 << self.n_bits) - 1
        slots = self._first_slots(hashes)
        found = self.table[slots]
        active = np.flatnonzero((found >= 0) & (self.hashes[found] != hashes))
        slots = slots[active]
        while active.size:
            slots = (slots + 1) & mask
            found[active] = self.table[slots]
            here = found[active]
            wrong = (here >= 0) & (self.hashes[here] != hashes[active])
            active, slots = active[wrong], slots[wrong]
        return found
