"""A model's hyperparameters, read from GGUF metadata and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from ignis.errors import ModelFileError, UnsupportedModelError
from ignis.graph.models.lowering import Tensor
from ignis.graph.models.registry import find_architecture

MAX_COUNT = 2**31 - 1
"""No axis of a model is longer: sizes are checked before anything is computed from them."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "attention.scale": (0,),
        "attn_logit_softcapping": (0,),
        "embedding_scale": (0, 1),
        "expert_count": (0,),
        "final_logit_softcapping": (0,),
        "logit_scale": (0, 1),
        "residual_scale": (0, 1),
        "rope.scale_linear": (0, 1),
        "rope.scaling.attn_factor": (0, 1),
        "rope.scaling.factor": (0, 1),
        "rope.scaling.type": ("none",),
    }
)
"""Keys that change a model's meaning, and the values that leave it alone. Others are refused."""


class ModelFile(Protocol):
    """What this module needs of an open GGUF file."""

    @property
    def path(self) -> str | Path: ...
    @property
    def metadata(self) -> Mapping[str, object]: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers that shape a decoder. Widths are in elements, `rope_base` is theta."""

    architecture: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    rope_base: float
    rope_dim: int
    rope_style: str
    tied_output: bool
    source: str = field(default="model", compare=False)
    """The file, for errors."""

    @classmethod
    def from_gguf(cls, file: ModelFile) -> ModelConfig:
        """Read and check the hyperparameters of an open file.

        Raises: ModelFileError for missing or senseless values, UnsupportedModelError for an
        architecture or a feature that cannot be run.
        """
        source = str(file.path)
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str):
            got = None if name is None else type(name).__name__
            raise ModelFileError("bad general.architecture", where=source, got=got, wanted="text")
        architecture = find_architecture(name, source)
        read = _Reader(source, name, file.metadata)
        n_ctx_train = read.count("context_length")
        read.refuse_features(n_ctx_train)
        n_embd, n_heads = read.count("embedding_length"), read.count("attention.head_count")
        n_kv_heads = read.count("attention.head_count_kv", n_heads)
        if n_heads % n_kv_heads:
            raise read.bad("attention.head_count_kv", f"a divisor of head_count {n_heads}")
        if "attention.key_length" not in read and n_embd % n_heads:
            raise read.bad("attention.head_count", f"a divisor of embedding_length {n_embd}")
        head_dim = read.count("attention.key_length", n_embd // n_heads)
        if read.count("attention.value_length", head_dim) != head_dim:
            raise read.unsupported("attention.value_length", f"the key length, {head_dim}")
        rope_dim = read.count("rope.dimension_count", head_dim)
        if rope_dim % 2 or rope_dim > head_dim:
            raise read.bad("rope.dimension_count", f"an even number up to {head_dim}")
        return cls(
            architecture=name,
            n_layers=read.count("block_count"),
            n_embd=n_embd,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            n_ff=read.count("feed_forward_length"),
            n_vocab=_vocabulary_size(file, source),
            n_ctx_train=n_ctx_train,
            norm_eps=read.positive("attention.layer_norm_rms_epsilon"),
            rope_base=read.positive("rope.freq_base", 10000.0, least=1.0),
            rope_dim=rope_dim,
            rope_style=architecture.rope_style,
            tied_output="output.weight" not in file.tensors,
            source=source,
        )


class _Reader:
    """Typed access to the keys of one architecture."""

    def __init__(self, source: str, architecture: str, metadata: Mapping[str, object]) -> None:
        self._source, self._prefix, self._metadata = source, architecture, metadata

    def __contains__(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self._metadata

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        wanted = f"an integer from 1 to {MAX_COUNT}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(key, wanted)
        if not 1 <= value <= MAX_COUNT:
            raise self.bad(key, wanted)
        return value

    def positive(self, key: str, default: float | None = None, *, least: float = 0.0) -> float:
        value = self._get(key, default)
        wanted = f"a finite number, {least} or more, above 0"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(key, wanted)
        if not (0 < value < math.inf and value >= least):
            raise self.bad(key, wanted)
        return float(value)

    def refuse_features(self, n_ctx_train: int) -> None:
        """Refuse what would change the result: never ignore it."""
        for key, neutral in _NEUTRAL.items():
            value = self._get(key, neutral[0])
            if not isinstance(value, int | float | str) or value not in neutral:
                raise self.unsupported(key, " or ".join(map(repr, neutral)))
        window = self._get("attention.sliding_window", 0)
        if not isinstance(window, int) or 0 != window < n_ctx_train:
            raise self.unsupported("attention.sliding_window", f"{n_ctx_train} or more, or none")

    def bad(self, key: str, wanted: str) -> ModelFileError:
        return ModelFileError(
            f"bad {self._prefix}.{key}", where=self._source, got=self._shown(key), wanted=wanted
        )

    def unsupported(self, key: str, wanted: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"unsupported {self._prefix}.{key}",
            where=self._source,
            got=self._shown(key),
            wanted=wanted,
        )

    def _get(self, key: str, default: object) -> object:
        return self._metadata.get(f"{self._prefix}.{key}", default)

    def _shown(self, key: str) -> str:
        value = self._get(key, None)
        if value is None:
            return "nothing"
        shown = isinstance(value, bool | int | float | str)
        return repr(value)[:80] if shown else f"a {type(value).__name__}"


def _vocabulary_size(file: ModelFile, source: str) -> int:
    """Rows of the embedding matrix, of which the tokenizer may use fewer."""
    tensor = file.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2:
        got = None if tensor is None else list(tensor.shape)
        raise ModelFileError(
            "tensor token_embd.weight is missing or misshapen",
            where=source,
            got=got,
            wanted="a matrix [vocabulary, width]",
        )
    n_vocab = int(tensor.shape[0])
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    n_tokens = len(tokens) if hasattr(tokens, "__len__") else 0
    if n_tokens > n_vocab:
        raise ModelFileError(
            "tensor token_embd.weight has fewer rows than there are tokens",
            where=source,
            got=n_vocab,
            wanted=n_tokens,
        )
    return n_vocab
