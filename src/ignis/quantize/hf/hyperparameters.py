"""config.json to GGUF's hyperparameters: what a model computes is followed or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ignis.errors import ModelFileError
from ignis.graph.models.config import MAX_PARTS
from ignis.quantize.hf.architectures import HFArchitecture
from ignis.quantize.hf.config import Section
from ignis.quantize.hf.rope import Factors, read_rope

_LAYERS_OF_27B: Mapping[str, int] = {"gemma2": 46, "gemma3": 62}
_NO_ROPE_STEP = 4       # of smollm3, whose files do not say it


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What is read: `keys` of GGUF with the architecture's name, and numbers that others need.

    `factors` are rope's, by tensor name, float32 [n_rot / 2].
    """

    keys: Mapping[str, Any]
    factors: Mapping[str, Factors]
    n_layers: int
    n_heads: int
    n_kv_heads: int
    n_experts: int
    tied: bool


def read_hyperparameters(config: Section, architecture: HFArchitecture) -> Hyperparameters:
    """Read and check config.json.

    Raises ModelFileError for numbers that are missing or senseless, UnsupportedModelError for
    what Ignis does not compute.
    """
    _refuse_features(config, architecture)
    n_embd = config.count("hidden_size")
    n_layers = config.count("num_hidden_layers", most=MAX_PARTS)
    n_heads = config.count("num_attention_heads")
    n_kv_heads = config.count("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise config.bad("num_key_value_heads", f"a divisor of num_attention_heads, {n_heads}")
    if "head_dim" not in config and n_embd % n_heads:
        raise config.bad("num_attention_heads", f"a divisor of hidden_size, {n_embd}")
    head_dim = config.count("head_dim", n_embd // n_heads, most=MAX_PARTS)
    n_ctx = config.count("max_position_embeddings")
    rope = read_rope(config, head_dim, n_ctx)
    if architecture.pairs_apart and rope.keys["rope.dimension_count"] != head_dim:
        raise ModelFileError("rope of a part of each head is not supported here",
                             where=config.where, got=config.get("partial_rotary_factor"), wanted=1)
    keys: dict[str, Any] = {
        "block_count": n_layers,
        "context_length": n_ctx,
        "embedding_length": n_embd,
        "feed_forward_length": config.count("intermediate_size"),
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.positive("rms_norm_eps"),
        **rope.keys,
        **_window(config, architecture, n_layers),
        **_caps(config, architecture),
        **_scales(config, architecture, n_layers, head_dim),
    }
    experts = _experts(config) if architecture.has_experts else {}
    keys |= experts
    return Hyperparameters(
        {f"{architecture.gguf}.{key}": value for key, value in keys.items()}, rope.factors,
        n_layers, n_heads, n_kv_heads, experts.get("expert_count", 0),
        config.flag("tie_word_embeddings"),
    )  # fmt: skip


def _refuse_features(config: Section, architecture: HFArchitecture) -> None:
    config.refuse("quantization_config", hint="take the checkpoint in BF16 or F16")
    key, wanted = architecture.activation
    config.refuse(key, wanted, "swish" if wanted == "silu" else wanted)
    config.refuse("use_bidirectional_attention", False)
    config.refuse("use_mrope", False)
    if not architecture.has_experts:
        for key in ("num_experts", "num_local_experts"):
            config.refuse(key, 0)
    if architecture.windows == "none":
        config.refuse("use_sliding_window", False)
        layers = config.items("layer_types", config.count("num_hidden_layers"))
        if any(kind != "full_attention" for kind in layers or ()):
            raise config.bad("layer_types", "full_attention alone")
    if architecture.gguf == "smollm3":
        _check_no_rope_layers(config)


def _check_no_rope_layers(config: Section) -> None:
    n_layers = config.count("num_hidden_layers")
    config.refuse("no_rope_layer_interval", _NO_ROPE_STEP)
    layers = config.items("no_rope_layers", n_layers)
    if layers is not None and layers != [int((i + 1) % _NO_ROPE_STEP != 0)
                                         for i in range(n_layers)]:
        raise config.bad("no_rope_layers", "rope in all layers but every fourth")


def _window(config: Section, architecture: HFArchitecture, n_layers: int) -> dict[str, Any]:
    """The sliding window, and which layers see it, where that is not the architecture's rule."""
    width = config.optional_count("sliding_window")
    if architecture.windows == "none" or width is None:
        return {}
    keys: dict[str, Any] = {"attention.sliding_window": width}
    if architecture.windows == "all":
        return keys
    usual = architecture.defaults["sliding_window_pattern"]
    step = config.count("_sliding_window_pattern", config.count("sliding_window_pattern"))
    local = [(i + 1) % step != 0 for i in range(n_layers)]
    if (kinds := config.items("layer_types", n_layers)) is not None:
        local = [kind == "sliding_attention" for kind in kinds]
    if local != [(i + 1) % usual != 0 for i in range(n_layers)]:
        keys["attention.sliding_window_pattern"] = np.array(local)
    return keys


def _caps(config: Section, architecture: HFArchitecture) -> dict[str, float]:
    if not architecture.branch_norms:
        return {}
    if architecture.gguf == "gemma3":
        config.refuse("attn_logit_softcapping")
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {name: config.positive(name) for name in names if name in config}


def _scales(config: Section, architecture: HFArchitecture, n_layers: int, head_dim: int
            ) -> dict[str, float]:
    scales = {key: config.positive(name, 1.0) for name, key in architecture.scales.items()}
    if "query_pre_attn_scalar" in config and architecture.gguf in _LAYERS_OF_27B:
        is_27b = n_layers == _LAYERS_OF_27B[architecture.gguf]
        width = config.count("hidden_size") // config.count("num_attention_heads")
        scalar = config.positive("query_pre_attn_scalar")
        if scalar != (width if is_27b else head_dim):
            scales["attention.scale"] = 1 / math.sqrt(scalar)
    return scales


def _experts(config: Section) -> dict[str, Any]:
    """GGUF's keys for the experts of a model; none for a model without."""
    n_experts = config.optional_count("num_experts", MAX_PARTS) \
        or config.optional_count("num_local_experts", MAX_PARTS)
    if n_experts is None:
        return {}
    config.refuse("decoder_sparse_step", 1)     # layers without experts
    config.refuse("mlp_only_layers", [])
    keys: dict[str, Any] = {"expert_count": n_experts,
                            "expert_used_count": config.count("num_experts_per_tok")}
    for name, key in (("moe_intermediate_size", "expert_feed_forward_length"),
                      ("shared_expert_intermediate_size", "expert_shared_feed_forward_length")):
        if (width := config.optional_count(name)) is not None:
            keys[key] = width
    if "norm_topk_prob" in config:
        keys["expert_weights_norm"] = config.flag("norm_topk_prob")
    return keys
