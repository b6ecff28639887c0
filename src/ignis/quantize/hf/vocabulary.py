"""The vocabulary of a checkpoint, as GGUF's `tokenizer.*` keys.

A `tokenizer.model` is a SentencePiece vocabulary; so is a `tokenizer.json` whose BPE falls back to
bytes. Any other BPE is a byte-level one. Tokens that were added later, special ids and the chat
template are the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ignis.errors import ModelFileError, TokenizerError
from ignis.quantize.hf import bytelevel, pieces
from ignis.quantize.hf.config import read_object
from ignis.quantize.hf.special import read_special
from ignis.quantize.hf.tokens import BaseVocabulary, Token
from ignis.text.vocabulary import TokenKind

_UNUSED_SCORE = -10000.0
_ADDED_SCORE = -1000.0
_LOOK_SPECIAL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")


def read_vocabulary(folder: Path, n_vocab: int) -> dict[str, Any]:
    """GGUF's keys for the tokenizer of a checkpoint whose embedding has `n_vocab` rows.

    Raises TokenizerError for a kind of tokenizer that is not supported or that contradicts
    itself, ModelFileError for files that are missing or cannot be read.
    """
    description = read_object(folder / "tokenizer.json", optional=True)
    settings = read_object(folder / "tokenizer_config.json", optional=True)
    where = folder / "tokenizer.json"
    if (path := folder / "tokenizer.model").exists():
        base = pieces.read_pieces(path, description, settings)
    elif not description:
        raise ModelFileError("no tokenizer", where=folder,
                             wanted="tokenizer.json or tokenizer.model")
    elif pieces.is_sentencepiece(description):
        base = pieces.from_description(description, settings, where)
    else:
        base = bytelevel.from_description(description, where)
    tokens = _complete(base, _added(folder, description, settings), n_vocab, folder)
    keys: dict[str, Any] = {
        **base.keys,
        "tokenizer.ggml.tokens": [token.text for token in tokens],
        "tokenizer.ggml.token_type": np.array([t.kind for t in tokens], np.int32),
    }
    if base.spells_spaces:
        keys["tokenizer.ggml.scores"] = np.array([t.score for t in tokens], np.float32)
    ids = {token.text: i for i, token in reversed([*enumerate(tokens)])}
    unknown = [i for i, token in enumerate(tokens) if token.kind == TokenKind.UNKNOWN]
    if unknown:
        keys["tokenizer.ggml.unknown_token_id"] = unknown[0]
    return keys | read_special(folder, description, settings, ids, n_vocab)


def _added(folder: Path, description: Mapping[str, Any], settings: Mapping[str, Any]
           ) -> dict[int, tuple[str, bool]]:
    """Tokens that stand beside the vocabulary: id -> (spelling, whether it is special)."""
    rows: list[tuple[Any, Any, Any]] = [
        (i, text, False)
        for text, i in read_object(folder / "added_tokens.json", optional=True).items()]
    decoder = settings.get("added_tokens_decoder") or {}
    listed = description.get("added_tokens") or []
    try:
        rows += [(int(i), row["content"], row.get("special")) for i, row in decoder.items()]
        rows += [(row["id"], row["content"], row.get("special")) for row in listed]
    except (AttributeError, LookupError, TypeError, ValueError):
        raise ModelFileError("bad added tokens", where=folder,
                             wanted="content, id and special of each") from None
    for i, text, special in rows:
        if type(i) is not int or not isinstance(text, str) or not isinstance(special, bool | None):
            raise ModelFileError("bad added token", where=folder, got=f"{text!r}, id {i!r}")
    return {i: (text, bool(special)) for i, text, special in rows}


def _complete(base: BaseVocabulary, added: Mapping[int, tuple[str, bool]], n_vocab: int,
              folder: Path) -> list[Token]:
    """One token a row of the embedding; rows that no token uses get a name that no text has."""
    if base.tokens and max(base.tokens) >= n_vocab:
        raise TokenizerError("more tokens than rows of the embedding", where=folder,
                             got=max(base.tokens) + 1, wanted=f"at most {n_vocab}")
    tokens = dict(base.tokens)
    for i, (text, special) in added.items():
        if 0 <= i < n_vocab:    # some models that see have one more, which text never needs
            tokens[i] = _with_kind(tokens.get(i), text, special, base.spells_spaces)
    return [tokens.get(i) or Token(f"[PAD{i}]", TokenKind.UNUSED, _UNUSED_SCORE)
            for i in range(n_vocab)]


def _with_kind(old: Token | None, text: str, special: bool, spells_spaces: bool) -> Token:
    if old is not None and old.kind in (TokenKind.UNKNOWN, TokenKind.BYTE):
        return old
    score = _ADDED_SCORE if old is None else old.score
    if special or _looks_special(text):
        return Token(text, TokenKind.CONTROL, score)
    # These are looked for in the text as it is written, before spaces are spelled out.
    return Token(text.replace("▁", " ") if spells_spaces else text, TokenKind.USER_DEFINED, score)


def _looks_special(text: str) -> bool:
    """Some files forget to mark tokens that no user's text should become."""
    return (text in _LOOK_SPECIAL or (text.startswith("<|") and text.endswith("|>"))
            or (text.startswith("<｜") and text.endswith("｜>"))
            or (text.startswith("<unused") and text.endswith(">")))
