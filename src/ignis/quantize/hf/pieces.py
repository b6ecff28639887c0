"""SentencePiece vocabularies: the `tokenizer.model` file, or the same as a tokenizer.json.

`tokenizer.model` is a protocol buffer of a few fields, read here without the package:

    ModelProto      1 pieces: repeated SentencePiece   2 trainer_spec   3 normalizer_spec
    SentencePiece   1 piece: string   2 score: float   3 type: enum, numbered as GGUF's
    TrainerSpec     3 model_type: 1 unigram, 2 BPE
    NormalizerSpec  3 add_dummy_prefix: bool, true unless said

Source: sentencepiece_model.proto of google/sentencepiece; the encoding of protocol buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from struct import error as StructError  # noqa: N812 (an exception, whatever its case)
from struct import unpack
from typing import Any

from ignis.errors import ModelFileError, TokenizerError
from ignis.quantize.hf.bytelevel import bpe_model, merges
from ignis.quantize.hf.tokens import BaseVocabulary, Token
from ignis.text.spm import SPACE
from ignis.text.vocabulary import TokenKind

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_BPE = 2
_KINDS = frozenset(int(kind) for kind in TokenKind)
_NO_MERGE_SCORE = -1e6      # below that of any merge


def read_pieces(path: Path, description: Mapping[str, Any], settings: Mapping[str, Any]
                ) -> BaseVocabulary:
    """The vocabulary of a tokenizer.model; what stands beside it may say more of spaces."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"cannot read it: {error.strerror}", where=path) from None
    tokens: list[Token] = []
    kind, prefix = 1, True
    try:
        for number, value in _fields(data):
            if number == _PIECES:
                tokens.append(_piece(value))
            elif number == _TRAINER:
                kind = dict(_fields(value)).get(3, kind)
            elif number == _NORMALIZER:
                prefix = bool(dict(_fields(value)).get(3, prefix))
    except (LookupError, ValueError, TypeError, AttributeError, StructError):
        tokens = []
    if not tokens:
        raise TokenizerError("not a SentencePiece model", where=path)
    if kind != _BPE:
        raise TokenizerError("this kind of SentencePiece model is not supported", where=path,
                             got={1: "unigram", 3: "word", 4: "char"}.get(kind, kind), wanted="BPE")
    said = _space_prefix(description, settings)
    return _vocabulary(dict(enumerate(tokens)), prefix if said is None else said)


def is_sentencepiece(description: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json describes a SentencePiece vocabulary."""
    model = description.get("model")
    return isinstance(model, dict) and bool(model.get("byte_fallback"))


def from_description(description: Mapping[str, Any], settings: Mapping[str, Any], where: object
                     ) -> BaseVocabulary:
    """The same from a tokenizer.json: the earlier a piece is merged, the higher its score."""
    model = bpe_model(description, where)
    ranks: dict[str, int] = {}
    for left, right in merges(model, where):
        ranks.setdefault(left + right, len(ranks))
    unknown = model.get("unk_token")

    def token(text: str) -> Token:
        if text == unknown:
            return Token(text, TokenKind.UNKNOWN)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return Token(text, TokenKind.BYTE)
        score = -float(ranks[text]) if text in ranks else _NO_MERGE_SCORE
        return Token(text, TokenKind.NORMAL, score)

    prefix = _space_prefix(description, settings)
    return _vocabulary({i: token(text) for text, i in model["vocab"].items()}, bool(prefix))


def _vocabulary(tokens: Mapping[int, Token], add_space_prefix: bool) -> BaseVocabulary:
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.add_space_prefix": add_space_prefix}
    return BaseVocabulary(tokens, keys, spells_spaces=True)


def _space_prefix(description: Mapping[str, Any], settings: Mapping[str, Any]) -> bool | None:
    """Whether a space goes before the text; None where neither file says."""
    if isinstance(said := settings.get("add_prefix_space"), bool):
        return said
    if not description:
        return None
    steps = [*_flat(description.get("normalizer"), "normalizers"),
             *_flat(description.get("pre_tokenizer"), "pretokenizers")]
    return any(
        (step.get("type") == "Prepend" and step.get("prepend") == SPACE)
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"
            and step.get("add_prefix_space", True))
        for step in steps
    )  # fmt: skip


def _flat(step: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    if isinstance(step, dict):
        yield step
        steps = step.get(inner)
        for each in steps if isinstance(steps, list) else ():
            yield from _flat(each, inner)


def _piece(data: bytes) -> Token:
    values = dict(_fields(data))
    text, kind = values[1].decode(), values.get(3, int(TokenKind.NORMAL))
    if kind not in _KINDS:
        raise ValueError
    if kind == TokenKind.USER_DEFINED:      # looked for in the text as it is written
        text = text.replace(SPACE, " ")
    return Token(text, kind, unpack("<f", values.get(2, bytes(4)))[0])


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message's fields: integers, or the bytes of all else.

    Raises IndexError or ValueError for what is no message.
    """
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            length, position = _varint(data, position)
        else:
            length = {1: 8, 5: 4}[wire] if wire in (1, 5) else len(data)
        end = position + length
        if end > len(data):
            raise ValueError
        yield number, data[position:end]
        position = end


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError
