"""The token list of a GGUF file: spellings, kinds, special ids, and a lookup by spelling."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.errors import TokenizerError
from ignis.gguf import GGUFFile, StringArray
from ignis.text.hashing import I32, HashIndex, Spans

MAX_TOKEN_BYTES = 1 << 16


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`, as the GGUF specification numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Tokens that end a reply, known by their spelling: files rarely name more than one of them.
_STOP_SPELLINGS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|end_of_turn|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "</s>",
)  # fmt: skip
# What SentencePiece numbers first, and files of its kind therefore need not name.
_SENTENCEPIECE_IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# White space after a special token is no text for these models. Which ones, no file says.
_STRIPPING_MODELS = ("phi-3", "phi3")
_NEVER_STRIPPING = (b"<unk>", b"<s>", b"<|endoftext|>")
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class Vocabulary:
    """Tokens by id, and ids by spelling.

    Spellings stay in the mapped file and are decoded when asked for; the lookup is a hash index of
    about 25 bytes a token.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.path = file.path
        self.tokens = file.require("tokenizer.ggml.tokens", StringArray)
        self.n_tokens = len(self.tokens)
        if not self.n_tokens:
            raise TokenizerError("the vocabulary is empty", where=self._where("tokens"))
        self.longest_token = int(self.tokens.lengths.max())  # bytes
        self.index = HashIndex(checked_spans(self.tokens, self._where("tokens")).hashes())
        self.kinds = self._read_kinds()
        self.bos_id, self.eos_id = self._id("bos_token_id"), self._id("eos_token_id")
        self.unknown_id = self._id("unknown_token_id")
        self.stop_ids = self._find_stop_ids()
        self.control_ids = self._find_control_ids()
        user_defined = np.flatnonzero(self.kinds == TokenKind.USER_DEFINED).tolist()
        self.user_defined_ids = frozenset(user_defined) - self.control_ids
        self.stripping_ids = self._find_stripping_ids()

    def _where(self, key: str) -> str:
        return f"{self.path}: tokenizer.ggml.{key}"

    def bytes_at(self, token_id: int) -> bytes:
        """The spelling of a token, as it stands in the file."""
        return self.tokens.bytes_at(token_id)

    def text_at(self, token_id: int) -> str:
        return self.bytes_at(token_id).decode("utf-8", "replace")

    def find(self, spellings: Sequence[bytes]) -> list[int]:
        """The id of each spelling, or -1."""
        if not spellings:
            return []
        ids: list[int] = self.find_hashes(Spans.of(spellings).hashes()).tolist()
        return ids

    def find_hashes(self, hashes: NDArray[np.uint64]) -> I32:
        return self.index.find(hashes)

    def option(self, key: str, default: bool) -> bool:
        """A switch of the file, such as `add_bos_token`."""
        return self._file.get(f"tokenizer.ggml.{key}", default, bool)

    def _id(self, key: str) -> int | None:
        value = self._file.get(f"tokenizer.ggml.{key}", None, int)
        if value is None and self._file.get("tokenizer.ggml.model", "", str) == "llama":
            default = _SENTENCEPIECE_IDS.get(key, self.n_tokens)
            return default if default < self.n_tokens else None
        if value is None or value in (-1, 0xFFFFFFFF):  # converters write -1 for "none"
            return None
        if not 0 <= value < self.n_tokens:
            raise TokenizerError("no such token", where=self._where(key), got=value,
                                 wanted=f"0 to {self.n_tokens - 1}")  # fmt: skip
        return value

    def _read_kinds(self) -> NDArray[Any]:
        kinds = self._file.get("tokenizer.ggml.token_type", None, np.ndarray)
        if kinds is None:
            return np.full(self.n_tokens, TokenKind.NORMAL, np.int32)
        if kinds.size != self.n_tokens or kinds.dtype.kind not in "iu":
            raise TokenizerError("not one type a token", where=self._where("token_type"),
                                 got=f"{kinds.size} of {kinds.dtype}",
                                 wanted=f"{self.n_tokens} integers")  # fmt: skip
        return kinds

    def _find_stop_ids(self) -> frozenset[int]:
        named = (self._id(key) for key in _STOP_KEYS)
        spelled = self.find([text.encode() for text in _STOP_SPELLINGS])
        found = {s: i for s, i in zip(_STOP_SPELLINGS, spelled, strict=True) if i >= 0}
        if "<|return|>" in found and "<|call|>" in found:
            found.pop("<|end|>", None)  # here a message of several ends, not the reply
        return frozenset(i for i in named if i is not None) | frozenset(found.values())

    def _find_control_ids(self) -> frozenset[int]:
        """Tokens that steer the model: by their kind, by their use, or by their look.

        Some converters mark `<|im_start|>` and its like as user-defined, which would be parsed in
        any text; what looks like a control token is treated as one.
        """
        by_kind = np.isin(self.kinds, (TokenKind.CONTROL, TokenKind.UNKNOWN))
        ids = set(np.flatnonzero(by_kind).tolist()) | self.stop_ids
        ids |= {i for i in (self.bos_id, self.eos_id) if i is not None}
        for i in np.flatnonzero(self.kinds == TokenKind.USER_DEFINED).tolist():
            text = self.text_at(i)
            if text.startswith(("<|", "<｜")) and text.endswith(("|>", "｜>")):
                ids.add(i)
        return frozenset(i for i in ids if self.bytes_at(i))

    def _find_stripping_ids(self) -> frozenset[int]:
        """Special tokens that swallow the white space after them."""
        name = self._file.get("general.name", "", str).lower()
        if not any(model in name for model in _STRIPPING_MODELS):
            return frozenset()
        ids = self.control_ids | self.user_defined_ids
        return frozenset(i for i in ids if self.bytes_at(i) not in _NEVER_STRIPPING)


def checked_spans(strings: StringArray, where: str) -> Spans:
    """The strings as spans of the mapped file; raises `TokenizerError` for an absurd length."""
    lengths = np.asarray(strings.lengths, np.int64)
    longest = int(lengths.max(initial=0))
    if longest > MAX_TOKEN_BYTES:
        raise TokenizerError("a string is too long", where=where, got=f"{longest} bytes",
                             wanted=f"at most {MAX_TOKEN_BYTES}")  # fmt: skip
    return Spans(strings.data, np.asarray(strings.offsets, np.int64), lengths)
