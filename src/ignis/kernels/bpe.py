"""Byte pair merging: the loop that turns the bytes of words into tokens.

Of all neighbouring pairs of symbols that have a merge rule, the one of lowest rank is merged, the
leftmost of equals, until none is left. A heap of (rank, position) and a doubly linked list of
symbols make this O(n log n) for a word of n bytes, so a megabyte without a space is no trap.

Scratch for the longest word, n bytes long:

    symbols i32[n] | previous i32[n] | next i32[n] | rank i32[n] | merged i32[n] | heap i64[3n]

`rank[i]` belongs to the pair that starts at symbol i, NO_RANK for none. A heap entry is stale, and
skipped, when its rank is no longer that of its position. SentencePiece vocabularies are merged by
the same list and heap, but look their pairs up in another way: `kernels.spm`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from ignis.kernels.lang import Builder, Value, Variable, i8, i32, i64, kernel, ptr

SCRATCH_BYTES_A_BYTE = 5 * 4 + 3 * 8
NO_RANK = 0x7FFFFFFF
_LOW = 0xFFFFFFFF


def scratch_nbytes(longest_word: int) -> int:
    return SCRATCH_BYTES_A_BYTE * max(longest_word, 1)


class _Heap:
    """A binary min-heap of i64 in scratch memory."""

    def __init__(self, k: Builder, memory: Value) -> None:
        self.k, self.memory = k, memory
        self.size = k.var(k.const(i64, 0))

    def _slot(self, index: Value) -> Value:
        return self.memory.at(index << 3)

    def push(self, key: Value) -> None:
        k, i = self.k, self.k.var(self.size.get())
        self.size.set(self.size.get() + 1)
        moving = k.var(k.const(i64, 1))
        for _ in k.loop(lambda: (i.get() > 0) & (moving.get() > 0)):
            parent = (i.get() - 1) >> 1
            above = self._slot(parent).load(i64)
            moving.set((above > key).zext(i64))
            for _ in k.when(above > key):
                self._slot(i.get()).store(above)
                i.set(parent)
        self._slot(i.get()).store(key)

    def pop(self) -> Value:
        k = self.k
        least = self.memory.load(i64)
        last = self.size.get() - 1
        self.size.set(last)
        key = self._slot(last).load(i64)
        i, moving = k.var(k.const(i64, 0)), k.var(k.const(i64, 1))
        for _ in k.loop(lambda: ((i.get() << 1) + 1 < last) & (moving.get() > 0)):
            left = (i.get() << 1) + 1
            # The last slot still holds `key`, so reading it as a right child does no harm.
            a, b = self._slot(left).load(i64), self._slot(left + 1).load(i64)
            child, below = k.select(b < a, left + 1, left), k.select(b < a, b, a)
            moving.set((below < key).zext(i64))
            for _ in k.when(below < key):
                self._slot(i.get()).store(below)
                i.set(child)
        self._slot(i.get()).store(key)
        return least


class SymbolList(ABC):
    """The linked list of symbols of the word at hand, and its heap of candidate pairs.

    A symbol's index is any number below the word's length that grows along the word; `next` of the
    last one is that length, `previous` of the first -1.
    """

    def __init__(self, k: Builder, scratch: Value, capacity: Value) -> None:
        self.k = k
        column = capacity << 2
        self.symbols, self.previous, self.next, self.rank, self.merged = (
            scratch.at(column * index) for index in range(5)
        )
        self.heap = _Heap(k, scratch.at(column * 5))

    @abstractmethod
    def rules(self, position: Value, right: Value) -> Iterator[tuple[Value, Value]]:
        """Rank and merged symbol of the pair at `position`: at run time one or none."""

    def consider(self, position: Value, right: Value) -> None:
        """Look the pair of symbols at `position` and `right` up; a rule goes into the heap."""
        put(self.rank, position, self.k.const(i32, NO_RANK))
        for rank, merged in self.rules(position, right):
            put(self.rank, position, rank)
            put(self.merged, position, merged)
            self.heap.push((rank.zext(i64) << 32) | position)

    def merge_all(self, n: Value) -> None:
        """Merge until no candidate is left in a word of length `n`."""
        heap = self.heap
        for _ in self.k.loop(lambda: heap.size.get() > 0):
            least = heap.pop()
            position = least & _LOW
            for _ in self.k.when(get(self.rank, position).to(i64) == least.sar(32)):
                self._merge(position, n)

    def _merge(self, left: Value, n: Value) -> None:
        """Merge the pair that starts at `left`, and consider its new neighbours."""
        k = self.k
        right = get(self.next, left).zext(i64)
        after = get(self.next, right).zext(i64)
        put(self.symbols, left, get(self.merged, left))
        put(self.next, left, after.to(i32))
        put(self.rank, right, k.const(i32, NO_RANK))
        put(self.rank, left, k.const(i32, NO_RANK))
        for _ in k.when(after < n):
            put(self.previous, after, left.to(i32))
            self.consider(left, after)
        before = get(self.previous, left).to(i64)
        for _ in k.when(before >= 0):
            self.consider(before, left)


class _Word(SymbolList):
    """Symbols of bytes, whose rules stand in a `MergeTable`."""

    def __init__(
        self, k: Builder, scratch: Value, capacity: Value, slots: Value, n_bits: Value
    ) -> None:
        super().__init__(k, scratch, capacity)
        self.slots, self.shift = slots, k.const(i64, 64) - n_bits
        self.mask = (k.const(i64, 1) << n_bits) - 1

    def rules(self, position: Value, right: Value) -> Iterator[tuple[Value, Value]]:
        k = self.k
        left_symbol = get(self.symbols, position).zext(i64)
        key = (left_symbol << 32) | get(self.symbols, right).zext(i64)
        hashed = (key * k.const(i64, _MULTIPLIER)) >> self.shift
        slot = k.var(self.slots.at(hashed << 4))
        index: Variable = k.var(hashed)
        found = k.var(slot.get().load(i64))
        for _ in k.loop(lambda: (found.get() != key) & (found.get() >= 0)):
            index.set((index.get() + 1) & self.mask)
            slot.set(self.slots.at(index.get() << 4))
            found.set(slot.get().load(i64))
        for _ in k.when(found.get() == key):
            yield slot.get().at(8).load(i32), slot.get().at(12).load(i32)


_MULTIPLIER = 0x9E3779B97F4A7C15  # as in `text.hashing`, which builds the table


@kernel(
    text=ptr, offsets=ptr, byte_symbols=ptr, slots=ptr, n_bits=i64, capacity=i64, out=ptr,
    counts=ptr,
)  # fmt: skip
def merge_words(
    k: Builder, *, text: Value, offsets: Value, byte_symbols: Value, slots: Value, n_bits: Value,
    capacity: Value, out: Value, counts: Value, begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """Merge the words [begin, end) of `text`, word w being bytes offsets[w] to offsets[w + 1].

    offsets i64[end + 1]; byte_symbols i32[256]; slots: a `MergeTable` of 2^n_bits slots; capacity:
    the length of the longest word. Writes all words' symbols one after the other to `out` (i32, as
    many as there are bytes) and their number a word to `counts` (i32[end]).
    """
    word = _Word(k, scratch, capacity, slots, n_bits)
    written = k.var(k.const(i64, 0))
    for w in k.range(begin, end):
        start = offsets.at(w << 3).load(i64)
        n = offsets.at((w << 3) + 8).load(i64) - start
        for i in k.range(n):
            byte = text.at(start + i).load(i8).zext(i64)
            put(word.symbols, i, get(byte_symbols, byte))
            put(word.previous, i, (i - 1).to(i32))
            put(word.next, i, (i + 1).to(i32))
        for i in k.range(n - 1):
            word.consider(i, i + 1)
        word.merge_all(n)
        first = written.get()
        here = k.var(k.const(i64, 0))
        for _ in k.loop(lambda here=here, n=n: here.get() < n):  # type: ignore[misc]
            put(out, written.get(), get(word.symbols, here.get()))
            written.set(written.get() + 1)
            here.set(get(word.next, here.get()).zext(i64))
        put(counts, w, (written.get() - first).to(i32))


def get(array: Value, index: Value) -> Value:
    """Element `index` of an array of i32."""
    return array.at(index << 2).load(i32)


def put(array: Value, index: Value, value: Value) -> None:
    array.at(index << 2).store(value)
