"""Byte-level BPE: text is cut into pieces, the bytes of each piece are merged to tokens.

    "Hello world"  --cut-->  "Hello", " world"  --bytes, merge rules-->  [9906, 1917]

Three ways to merge, all equal: `merge_plain` says what is meant in a few lines; the kernel
`merge_words` does it in machine code; and most words are simply remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from ignis.gguf import GGUFFile, StringArray
from ignis.text.bytelevel import to_bytes, to_characters
from ignis.text.merges import MergeTable, read_merges
from ignis.text.pretokenize import pre_tokenizer
from ignis.text.vocabulary import TokenKind, Vocabulary
from ignis.text.words import Ids, Merge, WordModel, merge_native


def merge_plain(data: bytes, table: MergeTable) -> list[int]:
    """Merge byte pairs the plain way: O(n^2), the oracle of the native loop."""
    symbols = [int(table.byte_symbols[byte]) for byte in data]
    while True:
        found = [
            (rule[0], i, rule[1])
            for i, (left, right) in enumerate(pairwise(symbols))
            if (rule := table.find(left, right)) is not None
        ]
        if not found:
            return symbols
        _, i, merged = min(found)
        symbols[i : i + 2] = [merged]


class NativeMerger:
    """Merges the bytes of many words in one call of machine code."""

    def __init__(self, table: MergeTable) -> None:
        self._table = table

    def __call__(self, words: Sequence[bytes]) -> list[list[int]]:
        """The symbols of each word."""
        table = self._table
        tables = {
            "byte_symbols": table.byte_symbols, "slots": table.slots, "n_bits": table.n_bits,
        }  # fmt: skip
        return merge_native("merge_words", words, tables)


class ByteLevelBPE(WordModel):
    """The tokenizer model that GGUF calls `gpt2`."""

    def __init__(self, file: GGUFFile, vocabulary: Vocabulary, pre: str | None = None) -> None:
        where = f"{file.path}: tokenizer.ggml"
        name = pre if pre is not None else file.get("tokenizer.ggml.pre", "default", str)
        kind = pre_tokenizer(name, "--pre" if pre else f"{where}.pre")
        merges = file.require("tokenizer.ggml.merges", StringArray)
        super().__init__(vocabulary, kind)
        self.table = read_merges(vocabulary, merges, f"{where}.merges")
        self.add_bos = kind.add_bos
        self._merge: Merge = NativeMerger(self.table)

    def _encode_units(self, units: list[str]) -> list[Ids]:
        if not self.pre.then:
            return self._encode_words(units)
        parts = [self.pre.split_unit(unit) for unit in units]
        pieces = iter(self._encode_words([piece for part in parts for piece in part]))
        return [tuple(chain.from_iterable(next(pieces) for _ in part)) for part in parts]

    def _encode_words(self, words: list[str]) -> list[Ids]:
        data = [word.encode("utf-8", "surrogateescape") for word in words]
        result: list[Ids] = [()] * len(words)
        rest: Sequence[int] = range(len(words))
        if self.pre.whole_words:
            for i, token in self._whole_words(data):
                result[i] = (token,)
            rest = [i for i in rest if not result[i]]
        n_tokens = self.vocabulary.n_tokens
        for i, symbols in zip(rest, self._merge([data[i] for i in rest]), strict=True):
            if self.table.extra and max(symbols) >= n_tokens:
                symbols = [t for s in symbols for t in self._tokens_of(s)]
            result[i] = tuple(symbols)
        return result

    def _whole_words(self, words: list[bytes]) -> Iterator[tuple[int, int]]:
        """Index and token of each word that is a vocabulary entry."""
        longest = self.vocabulary.longest_token  # spelling makes a word longer, never shorter
        candidates = [i for i, word in enumerate(words) if len(word) <= longest]
        tokens = self.vocabulary.find([to_characters(words[i]).encode() for i in candidates])
        return (pair for pair in zip(candidates, tokens, strict=True) if pair[1] >= 0)

    def _tokens_of(self, symbol: int) -> list[int]:
        """A symbol that is no token falls apart into its bytes' tokens.

        Some vocabularies lack bytes that their training text never had. Those are dropped, as the
        models' own tokenizers do: the "unknown" token may be a control token.
        """
        n_tokens = self.vocabulary.n_tokens
        if symbol < n_tokens:
            return [symbol]
        tokens = (int(self.table.byte_symbols[byte]) for byte in self.table.extra[symbol])
        return [token for token in tokens if token < n_tokens]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in text."""
        spelling = self.vocabulary.text_at(token_id)
        kind = int(self.vocabulary.kinds[token_id])
        return to_bytes(spelling) if kind in _SPELLED_IN_BYTES else spelling.encode()


_SPELLED_IN_BYTES = (TokenKind.NORMAL, TokenKind.UNUSED, TokenKind.BYTE)
