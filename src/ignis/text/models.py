"""The tokenizer models, by the names that GGUF files give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ignis.errors import UnsupportedModelError
from ignis.gguf import GGUFFile
from ignis.text.bpe import ByteLevelBPE
from ignis.text.spm import SentencePieceBPE
from ignis.text.vocabulary import Vocabulary
from ignis.text.words import WordModel

MODELS: Mapping[str, Callable[[GGUFFile, Vocabulary, str | None], WordModel]] = MappingProxyType(
    {"gpt2": ByteLevelBPE, "llama": SentencePieceBPE}
)
_KNOWN = {
    "bert": "WordPiece tokenizers, of embedding models, are",
    "t5": "SentencePiece unigram tokenizers are",
    "rwkv": "the tokenizer of RWKV is",
    "plamo2": "the tokenizer of PLaMo 2 is",
    "no_vocab": "a model without a vocabulary is",
    "none": "a model without a vocabulary is",
}


def tokenizer_model_name(file: GGUFFile) -> str:
    """What `tokenizer.ggml.model` names; raises `UnsupportedModelError` for what is not built."""
    name = file.require("tokenizer.ggml.model", str)
    if name not in MODELS:
        raise UnsupportedModelError(
            f"{_KNOWN.get(name, 'this kind of tokenizer is')} not supported",
            where=f"{file.path}: tokenizer.ggml.model", got=repr(name),
            wanted=" or ".join(map(repr, MODELS)),
        )  # fmt: skip
    return name
