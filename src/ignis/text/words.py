"""What tokenizer models have in common: text is cut into words, and most words are remembered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ignis.kernels.bpe import merge_words, scratch_nbytes
from ignis.kernels.spm import PADDING_NBYTES, merge_pieces
from ignis.text.pretokenize import PreTokenizer
from ignis.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from ignis.native.library import Library

Ids = tuple[int, ...]
Merge = Callable[[Sequence[bytes]], list[list[int]]]

_WINDOW = 1 << 16  # words encoded at a time
_REMEMBERED_WORDS = 1 << 15
_REMEMBERED_LENGTH = 64  # characters; longer words hardly ever come again
_KERNELS = {"merge_words": merge_words, "merge_pieces": merge_pieces}


class WordModel(ABC):
    """Encodes text word by word.

    `add_space_prefix`: text begins with a space that nobody wrote, and that decoding takes away.
    """

    add_bos = False
    add_space_prefix = False

    def __init__(self, vocabulary: Vocabulary, pre: PreTokenizer) -> None:
        self.vocabulary, self.pre = vocabulary, pre
        self._remembered: dict[str | int, Ids] = {}

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in text."""

    @abstractmethod
    def _encode_units(self, units: list[str]) -> list[Ids]:
        """The token ids of each of some words as the pre-tokenizer cuts them."""

    def encode(self, pieces: Iterable[str | int]) -> list[int]:
        """Token ids of pieces of text and of special tokens, which stand for themselves.

        Lone surrogates in a text stand for raw bytes.
        """
        ids: list[int] = []
        window: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                window.append(piece)
            else:
                for words in self._words(piece):
                    window += words
                    if len(window) > _WINDOW:
                        ids += self._encode_window(window)
                        window = []
        ids += self._encode_window(window)
        return ids

    def _words(self, text: str) -> Iterable[list[str]]:
        """The words of a piece of text, some at a time."""
        return self.pre.windows(text)

    def _encode_window(self, words: list[str | int]) -> Iterable[int]:
        known = self._remembered
        new = [word for word in set(words) if word not in known]
        if not new:
            return chain.from_iterable(map(known.__getitem__, words))
        texts = [word for word in new if isinstance(word, str)]
        encoded: dict[str | int, Ids] = dict(zip(texts, self._encode_units(texts), strict=True))
        encoded |= {word: (word,) for word in new if isinstance(word, int)}
        self._remember(encoded)
        return chain.from_iterable(
            ids if (ids := known.get(word)) is not None else encoded[word] for word in words
        )

    def _remember(self, encoded: dict[str | int, Ids]) -> None:
        short = {word: ids for word, ids in encoded.items()
                 if isinstance(word, int) or len(word) <= _REMEMBERED_LENGTH}  # fmt: skip
        if len(self._remembered) + len(short) > _REMEMBERED_WORDS:
            self._remembered = {}
        if len(short) <= _REMEMBERED_WORDS:
            # Another thread may be looking words up in it: growing is safe, shrinking would not be.
            self._remembered.update(short)


def merge_native(kernel: str, words: Sequence[bytes], tables: Mapping[str, Any]) -> list[list[int]]:
    """Merge the bytes of many words in one call of machine code; `tables` are the kernel's own."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    offsets = np.zeros(len(words) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    longest = int(lengths.max(initial=0))
    out, counts = np.empty(int(offsets[-1]), np.int32), np.empty(len(words), np.int32)
    args = {
        "text": np.frombuffer(b"".join([*words, bytes(PADDING_NBYTES)]), np.uint8),
        "offsets": offsets, "capacity": longest, "out": out, "counts": counts, **tables,
    }  # fmt: skip
    scratch = np.empty(scratch_nbytes(longest), np.uint8)
    _library(kernel).call(_KERNELS[kernel](), args, 0, len(words), scratch)
    ends = np.cumsum(counts, dtype=np.int64)
    symbols = out[: int(ends[-1]) if len(words) else 0].tolist()
    begins = (ends - counts).tolist()
    return [symbols[b:e] for b, e in zip(begins, ends.tolist(), strict=True)]


@cache  # machine code of this process, the same for every vocabulary
def _library(kernel: str) -> Library:
    from ignis.native.cache import ObjectCache
    from ignis.native.host import running_target
    from ignis.native.library import Library
    from ignis.settings import Settings

    settings = Settings.from_env()
    target = running_target(settings.target)
    return Library([_KERNELS[kernel]()], target, ObjectCache(settings.objects_dir))
