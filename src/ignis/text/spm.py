"""SentencePiece BPE: pieces of text with scores, as the vocabularies of llama, phi-3 and gemma.

    "Hello world"  --spaces-->  "▁Hello▁world"  --merge by score-->  [15043, 3186]

A space is written `▁` (U+2581), and many models put one before the text. Neighbouring pieces merge
while their text together is a piece of the vocabulary, the highest score first. A character that is
no piece falls back to its bytes, `<0xE2>` and so on, or to the unknown token.

As in llama.cpp, text is not normalised: runs of spaces and any form of a letter stay as they are.
Unlike there, no text becomes a control token or a byte token by merging.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray

from ignis.errors import TokenizerError
from ignis.gguf import GGUFFile
from ignis.kernels.bpe import NO_RANK
from ignis.text.hashing import I32
from ignis.text.pretokenize import PreTokenizer
from ignis.text.vocabulary import TokenKind, Vocabulary, checked_spans
from ignis.text.words import Ids, WordModel, merge_native

SPACE = "▁"
_BROKEN = regex.compile("([\udc80-\udcff])")  # bytes that are not UTF-8


class SentencePieceBPE(WordModel):
    """The tokenizer model that GGUF calls `llama`."""

    add_bos = True

    def __init__(self, file: GGUFFile, vocabulary: Vocabulary, pre: str | None = None) -> None:
        where = f"{file.path}: tokenizer.ggml"
        if pre is not None:
            raise TokenizerError("this kind of tokenizer has no pre-tokenizer", where="--pre",
                                 got=repr(pre), wanted="no such option")  # fmt: skip
        super().__init__(vocabulary, PreTokenizer("llama", _cut_pattern(vocabulary, where)))
        self.add_space_prefix = vocabulary.option("add_space_prefix", True)
        self.scores = read_scores(file, vocabulary.n_tokens, f"{where}.scores")
        self.byte_tokens = self._find_byte_tokens(where)
        self._bytes = {int(t): bytes((b,)) for b, t in enumerate(self.byte_tokens)}
        self.splits = bool(self._bytes.keys() - {vocabulary.unknown_id})
        if not self.splits:
            self._bytes = {}
        self.ranks = self._rank()

    def _find_byte_tokens(self, where: str) -> I32:
        """The token of each byte; the unknown token where there is none."""
        found = self.vocabulary.find([b"<0x%02X>" % byte for byte in range(256)])
        tokens = np.array(found, np.int32)
        if (tokens < 0).any():
            if self.vocabulary.unknown_id is None:
                raise TokenizerError("neither byte tokens nor an unknown token", where=where,
                                     got="no " + f"<0x{int((tokens < 0).argmax()):02X}>")
            tokens[tokens < 0] = self.vocabulary.unknown_id
        return tokens

    def _rank(self) -> I32:
        """Scores as integers that sort the other way round; NO_RANK for what no text becomes."""
        bits = (self.scores + np.float32(0)).view(np.int32)  # + 0 turns -0 into 0
        # The bits of floats sort like integers, but for negative ones, which sort backwards.
        ranks: I32 = ~np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
        ranks[self.vocabulary.kinds == TokenKind.BYTE] = NO_RANK
        ranks[list(self.vocabulary.control_ids | self._bytes.keys())] = NO_RANK
        return ranks

    def _words(self, text: str) -> Iterable[list[str]]:
        broken = not text.isascii() and _BROKEN.search(text)
        text = text.replace(" ", SPACE)
        if self.add_space_prefix:
            text = SPACE + text
        if not broken:
            return self.pre.windows(text)
        # A broken byte is a word of its own: llama.cpp lets it swallow what follows, spaces too,
        # which then come back as the bytes of `▁`.
        parts = filter(None, _BROKEN.split(text))
        return chain.from_iterable(map(self.pre.windows, parts))

    def _encode_units(self, units: list[str]) -> list[Ids]:
        data = [unit.encode("utf-8", "surrogateescape") for unit in units]
        return list(map(tuple, self.merge(data)))

    def merge(self, words: Sequence[bytes]) -> list[list[int]]:
        """The tokens of each word, by machine code; no word may be empty."""
        index = self.vocabulary.index
        tables = {
            "hashes": index.hashes, "table": index.table, "n_bits": index.n_bits,
            "ranks": self.ranks, "longest": self.vocabulary.longest_token,
            "byte_tokens": self.byte_tokens, "split": int(self.splits),
        }  # fmt: skip
        return merge_native("merge_pieces", words, tables)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in text."""
        if (byte := self._bytes.get(token_id)) is not None:
            return byte
        spelling = self.vocabulary.bytes_at(token_id)
        kind = int(self.vocabulary.kinds[token_id])
        if kind in (TokenKind.NORMAL, TokenKind.UNUSED):
            return spelling.replace(SPACE.encode(), b" ")
        return spelling


def merge_plain(data: bytes, model: SentencePieceBPE) -> list[int]:
    """Merge pieces the plain way: O(n^2), the oracle of the native loop."""
    symbols = [data[i:j] for i, j in pairwise(_character_offsets(data))]
    while True:
        tokens = [_token(model, left + right) for left, right in pairwise(symbols)]
        found = [(-model.scores[t], i) for i, t in enumerate(tokens) if t is not None]
        if not found:
            break
        _, i = min(found)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids: list[int] = []
    for symbol in symbols:
        token = _token(model, symbol)
        fallen = symbol if model.splits else symbol[:1]
        ids += [int(model.byte_tokens[b]) for b in fallen] if token is None else [token]
    return ids


def _token(model: SentencePieceBPE, spelling: bytes) -> int | None:
    token = model.vocabulary.find([spelling])[0]
    return token if token >= 0 and model.ranks[token] != NO_RANK else None


def _character_offsets(data: bytes) -> list[int]:
    offsets = [0]
    while offsets[-1] < len(data):
        byte = data[offsets[-1]]
        length = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
        offsets.append(min(offsets[-1] + length, len(data)))
    return offsets


def read_scores(file: GGUFFile, n_tokens: int, where: str) -> NDArray[np.float32]:
    """`tokenizer.ggml.scores`; raises `TokenizerError` unless there is one number a token."""
    scores: Any = file.get("tokenizer.ggml.scores", None, np.ndarray)
    if scores is None:
        raise TokenizerError("scores are missing", where=where, wanted=f"{n_tokens} numbers",
                             hint="convert the model again; without scores no text can be encoded")
    if scores.size != n_tokens or scores.dtype.kind != "f":
        raise TokenizerError("not one score a token", where=where,
                             got=f"{scores.size} of {scores.dtype}",
                             wanted=f"{n_tokens} of float32")  # fmt: skip
    if np.isnan(scores).any():
        raise TokenizerError("a score is not a number", where=where,
                             got=f"NaN for token {int(np.isnan(scores).argmax())}")  # fmt: skip
    result: NDArray[np.float32] = scores.astype(np.float32, copy=False)
    return result


def _cut_pattern(vocabulary: Vocabulary, where: str) -> str:
    """Where text can be cut without changing the result, as a pattern whose matches tile it.

    Merging never crosses two neighbouring characters that are neighbours in no piece. So text may
    be cut before a `▁` unless a piece holds one right behind the same character. In most
    vocabularies only runs of `▁` do that, which makes words of the text.
    """
    before = {c for text in _with_inner_space(vocabulary, where)
              for c, next_c in pairwise(text) if next_c == SPACE} - {SPACE}  # fmt: skip
    if not before:
        return f"{SPACE}++[^{SPACE}]*+|[^{SPACE}]++"
    joining = "".join(map(regex.escape, sorted(before), [True] * len(before)))
    part = f"(?:[^{SPACE}{joining}]++|[{joining}]{SPACE}*+)"
    return f"{SPACE}++{part}*+|{part}++"


def _with_inner_space(vocabulary: Vocabulary, where: str) -> list[str]:
    """The pieces with a `▁` that is not their first character."""
    spans = checked_spans(vocabulary.tokens, f"{where}.tokens")
    space = SPACE.encode()
    data = spans.bytes
    found = np.flatnonzero(data == space[0])
    found = found[found + 2 < data.size]
    found = found[(data[found + 1] == space[1]) & (data[found + 2] == space[2])]
    owners = np.searchsorted(spans.offsets, found, side="right") - 1
    first, end = spans.offsets[owners], spans.offsets[owners] + spans.lengths[owners]
    return [vocabulary.text_at(int(i)) for i in np.unique(owners[(found > first) & (found < end)])]
