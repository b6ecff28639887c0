"""Byte-level BPE of a tokenizer.json: tokens, merges and the name of its pre-tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ignis.errors import TokenizerError
from ignis.quantize.hf.config import kind_of
from ignis.quantize.hf.tokens import BaseVocabulary, Token
from ignis.text.recognize import recognize


def from_description(description: Mapping[str, Any], where: object) -> BaseVocabulary:
    """The vocabulary; TokenizerError for another kind of model or a normalizer that matters."""
    model = bpe_model(description, where)
    decoder = kind_of(description.get("decoder"))
    if decoder != "ByteLevel":
        raise TokenizerError("this kind of tokenizer is not supported", where=where,
                             got=f"a decoder {decoder!r}",
                             wanted="byte-level BPE or SentencePiece")
    normalizer = description.get("normalizer")
    # Canonical composition is what nearly all text has been through; no engine repeats it.
    if normalizer is not None and kind_of(normalizer) != "NFC":
        raise TokenizerError("unsupported normalizer", where=where, got=kind_of(normalizer),
                             wanted="none or NFC")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise TokenizerError(f"unsupported {key}", where=where, got=repr(model[key]))
    tokens = {i: Token(text) for text, i in model["vocab"].items()}
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": recognize(description.get("pre_tokenizer"),
                                        bool(model.get("ignore_merges")), where),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges(model, where)],
    }
    return BaseVocabulary(tokens, keys)


def bpe_model(description: Mapping[str, Any], where: object) -> Mapping[str, Any]:
    """The `model` of a tokenizer.json, if it is BPE with a vocabulary that makes sense."""
    model = description.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind != "BPE":
        raise TokenizerError("this kind of tokenizer is not supported", where=where,
                             got=repr(kind), wanted="'BPE'")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise TokenizerError("the vocabulary is empty", where=where)
    ids = vocab.values()
    if any(type(i) is not int or i < 0 for i in ids) or len(set(ids)) < len(vocab):
        raise TokenizerError("bad vocabulary", where=where, wanted="one id from 0 a token")
    return model


def merges(model: Mapping[str, Any], where: object) -> list[tuple[str, str]]:
    """The merge rules in order, from "a b" or, since 2024, ["a", "b"]."""
    rules: list[tuple[str, str]] = []
    listed = model.get("merges", [])
    if not isinstance(listed, list):
        raise TokenizerError("bad merge rules", where=where, wanted="a list")
    for rule in listed:
        pair = rule.split(" ") if isinstance(rule, str) else rule
        if not isinstance(pair, list) or len(pair) != 2 \
                or not all(isinstance(part, str) and part and " " not in part for part in pair):
            raise TokenizerError("bad merge rule", where=where, got=repr(rule)[:60],
                                 wanted="two pieces without spaces")
        rules.append((pair[0], pair[1]))
    return rules
