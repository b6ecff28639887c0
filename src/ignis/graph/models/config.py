"""A model's hyperparameters, read from GGUF metadata and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from ignis.errors import ModelFileError, UnsupportedModelError
from ignis.graph.ir.kv_types import DEFAULT_KV_TYPE
from ignis.graph.ir.rope import UNSCALED, RopeScaling
from ignis.graph.models.architecture import Architecture
from ignis.graph.models.experts import Experts
from ignis.graph.models.lowering import Tensor
from ignis.graph.models.registry import find_architecture

MAX_COUNT = 2**31 - 1
MAX_PARTS = 2**16
"""Layers, experts or elements of a head: beyond any model, and few enough to count through."""
"""No axis of a model is longer: sizes are checked before anything is computed from them."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "attention.scale": (0,),
        "attention.sliding_window": (0,),
        "attn_logit_softcapping": (0,),
        "embedding_scale": (0, 1),
        "expert_count": (0,),
        "expert_gating_func": (1,),
        "expert_group_count": (0, 1),
        "expert_group_scale": (0, 1),
        "expert_group_used_count": (0, 1),
        "expert_shared_count": (0,),
        "expert_shared_feed_forward_length": (0,),
        "expert_weights_norm": (False,),
        "expert_weights_scale": (0, 1),
        "experts_per_group": (0, 1),
        "final_logit_softcapping": (0,),
        "interleave_moe_layer_step": (0, 1),
        "leading_dense_block_count": (0,),
        "logit_scale": (0, 1),
        "moe_every_n_layers": (0, 1),
        "residual_scale": (0, 1),
        "rope.freq_base_swa": (0,),
        "rope.scaling.yarn_attn_factor": (0, 1),
        "rope.scaling.yarn_ext_factor": (-1, 1),
        "rope.scaling.yarn_log_multiplier": (0,),
    }
)
"""Keys that change a model's meaning, and the values that leave it alone. Others are refused,

unless the architecture honours the key.
"""


class ModelFile(Protocol):
    """What this module needs of an open GGUF file."""

    @property
    def path(self) -> str | Path: ...
    @property
    def metadata(self) -> Mapping[str, object]: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


class ModelConfig(NamedTuple):
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
    rope_scaling: RopeScaling = UNSCALED
    local_rope_base: float | None = None
    """Of the layers with a sliding window, where it differs; they are not stretched then."""
    long_rope_above: int | None = None
    """Contexts of more positions take the second set of frequency factors, where there are two."""
    n_ctx: int | None = None
    """Positions of the context that the model is compiled for, where they make a difference."""
    window: int | None = None
    """Positions that a token of the `local_layers` sees, its own among them."""
    local_layers: frozenset[int] = frozenset()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: Experts | None = None
    kv_type: str = DEFAULT_KV_TYPE
    """How the KV cache keeps keys and values."""
    source: str = "model"
    """The file, for errors."""

    @property
    def score_scale(self) -> float:
        """What attention multiplies scores by."""
        # IEEE square root and division: the same everywhere.
        return self.attention_scale or 1.0 / math.sqrt(self.head_dim)

    @property
    def is_long_context(self) -> bool:
        """Whether the second of two sets of frequency factors counts."""
        return (self.n_ctx or 0) > (self.long_rope_above or 0)

    def for_context(self, n_ctx: int, kv_type: str = DEFAULT_KV_TYPE) -> ModelConfig:
        """This model in a context of `n_ctx` positions, kept as `kv_type`."""
        return self._replace(
            kv_type=kv_type, n_ctx=None if self.long_rope_above is None else n_ctx
        )

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
        read.refuse_features(architecture)
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
        n_layers = read.count("block_count", most=MAX_PARTS)
        rope_base = read.positive("rope.freq_base", 10000.0, least=1.0)
        scaling, long_rope_above = _rope_scaling(read, rope_base, rope_dim, n_ctx_train)
        window = read.optional_count("attention.sliding_window")
        if window is not None and window >= n_ctx_train:
            window = None
        experts = _experts(read)
        config = cls(
            architecture=name,
            n_layers=n_layers,
            n_embd=n_embd,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            n_ff=read.count("feed_forward_length", experts.n_ff if experts else None),
            n_vocab=_vocabulary_size(file, source),
            n_ctx_train=n_ctx_train,
            norm_eps=read.positive("attention.layer_norm_rms_epsilon"),
            rope_base=rope_base,
            rope_dim=rope_dim,
            rope_style=architecture.rope_style,
            tied_output="output.weight" not in file.tensors,
            rope_scaling=scaling,
            local_rope_base=read.optional_positive("rope.freq_base_swa"),
            long_rope_above=long_rope_above,
            window=window,
            local_layers=read.local_layers(n_layers, architecture.window_pattern)
            if window else frozenset(),
            attention_scale=read.optional_positive("attention.scale"),
            attention_softcap=read.optional_positive("attn_logit_softcapping"),
            logit_softcap=read.optional_positive("final_logit_softcapping"),
            embedding_scale=read.optional_positive("embedding_scale") or 1.0,
            residual_scale=read.optional_positive("residual_scale") or 1.0,
            # Files name the divisor of logits.
            logit_scale=1.0 / (read.optional_positive("logit_scale") or 1.0),
            experts=experts,
            source=source,
        )
        return architecture.complete(config)


class _Reader:
    """Typed access to the keys of one architecture."""

    def __init__(self, source: str, architecture: str, metadata: Mapping[str, object]) -> None:
        self._source, self._prefix, self._metadata = source, architecture, metadata

    def __contains__(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self._metadata

    def count(self, key: str, default: int | None = None, most: int = MAX_COUNT) -> int:
        value = self._get(key, default)
        wanted = f"an integer from 1 to {most}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(key, wanted)
        if not 1 <= value <= most:
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

    def optional_count(self, key: str) -> int | None:
        """A count; None where there is none, or 0."""
        value = self._get(key, 0)
        return None if isinstance(value, int | float) and value == 0 else self.count(key)

    def optional_positive(self, key: str) -> float | None:
        """A number above zero; None where there is none, or 0."""
        value = self._get(key, 0)
        return None if isinstance(value, int | float) and value == 0 else self.positive(key)

    def optional_flag(self, key: str) -> bool | None:
        value = self._get(key, None)
        if not isinstance(value, bool | None):
            raise self.bad(key, "true or false")
        return value

    def choice(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        value = self._get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.unsupported(key, " or ".join(choices))
        return value

    def local_layers(self, n_layers: int, default_pattern: int) -> frozenset[int]:
        """The layers that a sliding window is for: all but every n-th, or those that are marked."""
        key = "attention.sliding_window_pattern"
        pattern = self._get(key, default_pattern)
        if isinstance(pattern, np.ndarray):
            if pattern.dtype != np.bool_ or len(pattern) < n_layers:
                raise self.bad(key, f"a number, or a truth value for each of {n_layers} layers")
            return frozenset(np.flatnonzero(pattern[:n_layers]).tolist())
        n = self.count(key, default_pattern)
        return frozenset(i for i in range(n_layers) if n == 1 or i % n < n - 1)

    def refuse_features(self, architecture: Architecture) -> None:
        """Refuse what would change the result: never ignore it."""
        more = {key: (value,) for key, value in architecture.neutral}
        for key, neutral in {**_NEUTRAL, **more}.items():
            value = self._get(key, neutral[0])
            if key in architecture.honours:
                continue
            if key == "attention.sliding_window":  # as wide as the context: no window
                n_ctx = self.count("context_length")
                if not isinstance(value, int) or 0 != value < n_ctx:
                    raise self.unsupported(key, f"{n_ctx} or more, or none")
            elif not isinstance(value, int | float | str) or value not in neutral:
                raise self.unsupported(key, " or ".join(map(repr, neutral)))

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


def _experts(read: _Reader) -> Experts | None:
    """The experts that the file speaks of, if it does."""
    n_experts = read.optional_count("expert_count")
    if n_experts is None:
        return None
    n_used = read.count("expert_used_count")
    if n_used > n_experts:
        raise read.bad("expert_used_count", f"at most expert_count {n_experts}")
    return Experts(
        n_experts=n_experts,
        n_used=n_used,
        n_ff=read.optional_count("expert_feed_forward_length"),
        n_ff_shared=read.optional_count("expert_shared_feed_forward_length"),
        normalized=read.optional_flag("expert_weights_norm"),
        scale=read.optional_positive("expert_weights_scale") or 1.0,
    )


def _rope_scaling(
    read: _Reader, base: float, n_rot: int, n_ctx_train: int
) -> tuple[RopeScaling, int | None]:
    """How rope is stretched, and the context above which the long factors count, if any do."""
    key = "rope.scaling.factor" if "rope.scaling.factor" in read else "rope.scale_linear"
    factor = read.optional_positive(key)
    kinds = ("none", "linear", "yarn", "longrope")
    kind = read.choice("rope.scaling.type", "linear" if factor else "none", kinds)
    magnitude = read.optional_positive("rope.scaling.attn_factor") or 1.0
    n_ctx_before = read.count("rope.scaling.original_context_length", n_ctx_train)
    if kind == "none":
        return RopeScaling(magnitude=magnitude), None
    if kind == "longrope":  # the factors are tensors
        return RopeScaling(magnitude=magnitude), n_ctx_before
    if factor is None:
        raise read.bad("rope.scaling.factor", f"a number above 0, for scaling of type {kind}")
    if kind == "linear":
        return RopeScaling(factor, magnitude=magnitude), None
    scaling = RopeScaling.yarn(
        factor, base, n_rot, n_ctx_before, magnitude=magnitude,
        beta_fast=read.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.positive("rope.scaling.yarn_beta_slow", 1.0),
    )  # fmt: skip
    return scaling, None


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
