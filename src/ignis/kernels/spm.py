"""Piece merging for SentencePiece vocabularies: characters of words become tokens.

There are no merge rules: any two neighbours may merge whose text together is a piece of the
vocabulary. The piece with the highest score goes first, the leftmost of equals. So a pair is looked
up by its text, with the hash of `text.hashing`, in the vocabulary's own index.

A symbol's index is the offset of its first byte in the word, which makes the text of a pair the
bytes from `position` to `next[right]`. List, heap and scratch are those of `kernels.bpe`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ignis.kernels.bpe import NO_RANK, SymbolList, get, put
from ignis.kernels.lang import Builder, Value, i8, i32, i64, kernel, ptr

PADDING_NBYTES = 8  # the hash reads whole words of eight bytes

_MULTIPLIER, _SECOND_MULTIPLIER = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # as in `text.hashing`


class _Word(SymbolList):
    """Symbols of characters; `start` is the address of the word at hand."""

    def __init__(
        self, k: Builder, scratch: Value, capacity: Value, text: Value, hashes: Value,
        table: Value, n_bits: Value, ranks: Value, longest: Value,
    ) -> None:  # fmt: skip
        super().__init__(k, scratch, capacity)
        self.start, self.hashes, self.table, self.ranks = k.var(text), hashes, table, ranks
        self.shift, self.mask = k.const(i64, 64) - n_bits, (k.const(i64, 1) << n_bits) - 1
        self.longest = longest

    def rules(self, position: Value, right: Value) -> Iterator[tuple[Value, Value]]:
        token = self.find(position, get(self.next, right).zext(i64))
        for _ in self.k.when(token >= 0):
            yield get(self.ranks, token), token.to(i32)

    def find(self, begin: Value, end: Value) -> Value:
        """The token (i64) spelled by bytes `begin` to `end` that text may become, or -1."""
        k, n = self.k, end - begin
        token = k.var(k.const(i64, -1))
        for _ in k.when(n <= self.longest):
            hashed = self._hash(begin, n)
            slot = k.var(hashed >> self.shift)
            token.set(get(self.table, slot.get()).to(i64))
            going = k.var(self._differs(token.get(), hashed))
            for _ in k.loop(lambda going=going: going.get() > 0):  # type: ignore[misc]
                slot.set((slot.get() + 1) & self.mask)
                token.set(get(self.table, slot.get()).to(i64))
                going.set(self._differs(token.get(), hashed))
            for _ in k.when(token.get() >= 0):
                for _ in k.when(get(self.ranks, token.get()) == NO_RANK):
                    token.set(-1)
        return token.get()

    def _differs(self, token: Value, hashed: Value) -> Value:
        """Whether a slot is taken by a token of another hash: an i64, 0 or 1."""
        k = self.k
        other = self.hashes.at(k.select(token < 0, token ^ token, token) << 3).load(i64)
        return ((token >= 0) & (other != hashed)).zext(i64)

    def _hash(self, begin: Value, n: Value) -> Value:
        k = self.k
        first, second = k.const(i64, _MULTIPLIER), k.const(i64, _SECOND_MULTIPLIER)
        hashed, left = k.var(n * second), k.var(n)
        place = k.var(self.start.get().at(begin))
        for _ in k.loop(lambda: left.get() > 0):
            word = place.get().load(i64)
            # The low `left` bytes of the last word: shifted up and down again.
            spare = k.select(left.get() < 8, (k.const(i64, 8) - left.get()) << 3, left.get() & 0)
            x = (hashed.get() ^ ((word << spare) >> spare)) * first
            hashed.set((x ^ (x >> 32)) * second)
            place.set(place.get().at(8))
            left.set(left.get() - 8)
        return hashed.get()

    def cut(self, n: Value) -> None:
        """Fill the list with the characters of a word of `n` bytes.

        A character is as long as its first byte says; broken UTF-8 must not come in longer words.
        """
        k = self.k
        here, before = k.var(k.const(i64, 0)), k.var(k.const(i64, -1))
        for _ in k.loop(lambda: here.get() < n):
            i = here.get()
            byte = self.start.get().at(i).load(i8).zext(i64)
            after = i + 1
            for least in (0xC0, 0xE0, 0xF0):
                after = after + (byte >= least).zext(i64)
            after = k.select(after < n, after, n)
            put(self.symbols, i, k.const(i32, -1))
            put(self.previous, i, before.get().to(i32))
            put(self.next, i, after.to(i32))
            before.set(i)
            here.set(after)

    def consider_all(self, n: Value) -> None:
        k = self.k
        here, right = k.var(k.const(i64, 0)), k.var(get(self.next, k.const(i64, 0)).zext(i64))
        for _ in k.loop(lambda: right.get() < n):
            self.consider(here.get(), right.get())
            here.set(right.get())
            right.set(get(self.next, here.get()).zext(i64))


@kernel(
    text=ptr, offsets=ptr, hashes=ptr, table=ptr, n_bits=i64, ranks=ptr, longest=i64,
    byte_tokens=ptr, split=i64, capacity=i64, out=ptr, counts=ptr,
)  # fmt: skip
def merge_pieces(
    k: Builder, *, text: Value, offsets: Value, hashes: Value, table: Value, n_bits: Value,
    ranks: Value, longest: Value, byte_tokens: Value, split: Value, capacity: Value, out: Value,
    counts: Value, begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """Merge the words [begin, end) of `text`, word w being bytes offsets[w] to offsets[w + 1].

    offsets i64[end + 1], no word empty; `PADDING_NBYTES` more bytes of text can be read; hashes,
    table, n_bits: a `HashIndex` of the vocabulary; ranks i32[n_tokens]: the lower the earlier,
    NO_RANK for a token that no text becomes; longest: bytes of the longest token. A character that
    is no token gives byte_tokens i32[256] of each of its bytes, or, if `split` is 0, of its first
    byte only. capacity, out and counts are as in `merge_words`.
    """
    word = _Word(k, scratch, capacity, text, hashes, table, n_bits, ranks, longest)
    written = k.var(k.const(i64, 0))

    def write(token: Value) -> None:
        put(out, written.get(), token)
        written.set(written.get() + 1)

    for w in k.range(begin, end):
        start = offsets.at(w << 3).load(i64)
        n = offsets.at((w << 3) + 8).load(i64) - start
        word.start.set(text.at(start))
        word.cut(n)
        word.consider_all(n)
        word.merge_all(n)
        first = written.get()
        here = k.var(k.const(i64, 0))
        for _ in k.loop(lambda here=here, n=n: here.get() < n):  # type: ignore[misc]
            i = here.get()
            after = get(word.next, i).zext(i64)
            token = k.var(get(word.symbols, i).to(i64))
            for _ in k.when(token.get() < 0):
                token.set(word.find(i, after))
            for _ in k.when(token.get() >= 0):
                write(token.get().to(i32))
            for _ in k.when(token.get() < 0):
                stop = k.select(split > 0, after, i + 1)
                for j in k.range(i, stop):
                    write(get(byte_tokens, text.at(start + j).load(i8).zext(i64)))
            here.set(after)
        put(counts, w, (written.get() - first).to(i32))
