"""Byte-level BPE: text is cut into pieces, the bytes of each piece are merged to tokens.

    "Hello world"  --cut-->  "Hello", " world"  --bytes, merge rules-->  [9906, 1917]

Three ways to merge, all equal: `merge_plain` says what is meant in a few lines; the kernel
`merge_words` does it in machine code; and most words are simply remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ignis.errors import UnsupportedModelError
from ignis.gguf import GGUFFile, StringArray
from ignis.kernels.bpe import merge_words, scratch_nbytes
from ignis.text.bytelevel import to_bytes, to_characters
from ignis.text.merges import MergeTable, read_merges
from ignis.text.pretokenize import PreTokenizer, pre_tokenizer
from ignis.text.vocabulary import TokenKind, Vocabulary

if TYPE_CHECKING:
    from ignis.native.library import Library

Ids = tuple[int, ...]

_REMEMBERED_WORDS = 1 << 15
_REMEMBERED_LENGTH = 64  # characters; longer words hardly ever come again


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
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        offsets = np.zeros(len(words) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        longest = int(lengths.max(initial=0))
        out, counts = np.empty(int(offsets[-1]), np.int32), np.empty(len(words), np.int32)
        args = {
            "text": np.frombuffer(b"".join(words), np.uint8), "offsets": offsets,
            "byte_symbols": self._table.byte_symbols, "slots": self._table.slots,
            "n_bits": self._table.n_bits, "capacity": longest, "out": out, "counts": counts,
        }  # fmt: skip
        scratch = np.empty(scratch_nbytes(longest), np.uint8)
        _library().call(merge_words(), args, 0, len(words), scratch)
        ends = np.cumsum(counts, dtype=np.int64)
        symbols = out[: int(ends[-1]) if len(words) else 0].tolist()
        begins = (ends - counts).tolist()
        return [symbols[b:e] for b, e in zip(begins, ends.tolist(), strict=True)]


@cache  # machine code of this process, the same for every vocabulary
def _library() -> Library:
    from ignis.native.cache import ObjectCache
    from ignis.native.host import host_target
    from ignis.native.library import Library
    from ignis.settings import Settings
    from ignis.target import Target

    settings = Settings.from_env()
    target = host_target() if settings.target is None else Target.level(settings.target)
    return Library([merge_words()], target, ObjectCache(settings.objects_dir))


class ByteLevelBPE:
    """The tokenizer model that GGUF calls `gpt2`."""

    def __init__(self, file: GGUFFile, vocabulary: Vocabulary, pre: str | None = None) -> None:
        where = f"{file.path}: tokenizer.ggml"
        name = pre if pre is not None else file.get("tokenizer.ggml.pre", "default", str)
        self.pre: PreTokenizer = pre_tokenizer(name, "--pre" if pre else f"{where}.pre")
        merges = file.require("tokenizer.ggml.merges", StringArray)
        self.vocabulary = vocabulary
        self.table = read_merges(vocabulary, merges, f"{where}.merges")
        self.add_bos = self.pre.add_bos
        self._merge: Callable[[Sequence[bytes]], list[list[int]]] = NativeMerger(self.table)
        self._remembered: dict[str, Ids] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of text without special tokens; lone surrogates stand for raw bytes."""
        ids: list[int] = []
        for units in self.pre.windows(text):
            ids += self._encode_window(units)
        return ids

    def _encode_window(self, words: list[str]) -> Iterable[int]:
        known = self._remembered
        new = [word for word in set(words) if word not in known]
        if not new:
            return chain.from_iterable(map(known.__getitem__, words))
        encoded = dict(zip(new, self._encode_units(new), strict=True))
        self._remember(encoded)
        return chain.from_iterable(
            ids if (ids := known.get(word)) is not None else encoded[word] for word in words
        )

    def _remember(self, encoded: dict[str, Ids]) -> None:
        short = {word: ids for word, ids in encoded.items() if len(word) <= _REMEMBERED_LENGTH}
        if len(self._remembered) + len(short) > _REMEMBERED_WORDS:
            self._remembered = {}
        if len(short) <= _REMEMBERED_WORDS:
            # A new dictionary: another thread may be reading the old one.
            self._remembered = {**self._remembered, **short}

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

MODELS: dict[str, Any] = {"gpt2": ByteLevelBPE}


def tokenizer_model(file: GGUFFile, vocabulary: Vocabulary, pre: str | None) -> ByteLevelBPE:
    """The tokenizer model that `tokenizer.ggml.model` names."""
    name = file.require("tokenizer.ggml.model", str)
    if name not in MODELS:
        raise UnsupportedModelError(
            "this kind of tokenizer is not supported yet",
            where=f"{file.path}: tokenizer.ggml.model", got=repr(name),
            wanted=" or ".join(map(repr, MODELS)),
        )  # fmt: skip
    model: ByteLevelBPE = MODELS[name](file, vocabulary, pre)
    return model
