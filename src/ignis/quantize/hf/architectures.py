"""The model classes of transformers that can be converted, and what each does its own way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ignis.errors import UnsupportedModelError
from ignis.quantize.hf.config import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class HFArchitecture:
    """A model class.

    gguf           `general.architecture` of its files
    defaults       of its configuration class, where a number is read that may be left out
    activation     the key that names the activation, and the value that is computed
    windows        how layers see a sliding window: "none", "all", "alternating"
    norm_offset    what is added to the gains of norms: Gemma's start from 0
    branch_norms   whether each branch is normalized before it is added, too
    pairs_apart    a head's rotated pairs are (i, i + C/2) in the checkpoint, but neighbours in GGUF
    has_experts    whether layers have experts in the feed-forward's place
    scales         keys that GGUF has under other names: numbers that default to 1
    """

    gguf: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    windows: str = "none"
    norm_offset: float = 0.0
    branch_norms: bool = False
    pairs_apart: bool = False
    has_experts: bool = False
    scales: Mapping[str, str] = field(default_factory=dict)


_COMMON: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "hidden_act": "silu",
}  # fmt: skip
_GEMMA: Mapping[str, Any] = {
    **_COMMON, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GELU = ("hidden_activation", "gelu_pytorch_tanh")
_LLAMA = HFArchitecture(gguf="llama", defaults=_COMMON, pairs_apart=True)
_GEMMA3 = HFArchitecture(
    gguf="gemma3",
    defaults={**_GEMMA, "max_position_embeddings": 131072, "rope_theta": 1e6,
              "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
    activation=_GELU, windows="alternating", norm_offset=1.0, branch_norms=True,
)  # fmt: skip

HF_ARCHITECTURES: Mapping[str, HFArchitecture] = MappingProxyType({
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": HFArchitecture(
        gguf="llama", pairs_apart=True, windows="all",
        defaults={**_COMMON, "num_key_value_heads": 8, "sliding_window": 4096}),
    "MixtralForCausalLM": HFArchitecture(
        gguf="llama", pairs_apart=True, windows="all", has_experts=True,
        defaults={**_COMMON, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
                  "num_local_experts": 8, "num_experts_per_tok": 2}),
    "Qwen2ForCausalLM": HFArchitecture(
        gguf="qwen2", defaults={**_COMMON, "num_key_value_heads": 32}),
    "Qwen3ForCausalLM": HFArchitecture(
        gguf="qwen3", defaults={**_COMMON, "num_key_value_heads": 32, "head_dim": 128}),
    "Qwen2MoeForCausalLM": HFArchitecture(
        gguf="qwen2moe", has_experts=True,
        defaults={**_COMMON, "num_key_value_heads": 16, "num_experts": 60,
                  "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                  "shared_expert_intermediate_size": 5632, "norm_topk_prob": False}),
    "Qwen3MoeForCausalLM": HFArchitecture(
        gguf="qwen3moe", has_experts=True,
        defaults={**_COMMON, "num_key_value_heads": 4, "num_experts_per_tok": 8,
                  "moe_intermediate_size": 768, "norm_topk_prob": False}),
    "Gemma2ForCausalLM": HFArchitecture(
        gguf="gemma2", activation=_GELU, windows="alternating", norm_offset=1.0,
        branch_norms=True,
        defaults={**_GEMMA, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
                  "final_logit_softcapping": 30.0, "sliding_window_pattern": 2}),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": HFArchitecture(
        gguf="phi3", windows="all", defaults={**_COMMON, "rms_norm_eps": 1e-5}),
    "GraniteForCausalLM": HFArchitecture(
        gguf="granite", pairs_apart=True, defaults=_COMMON,
        scales={"embedding_multiplier": "embedding_scale",
                "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
                "attention_multiplier": "attention.scale"}),
    "SmolLM3ForCausalLM": HFArchitecture(
        gguf="smollm3", pairs_apart=True,
        defaults={**_COMMON, "rope_theta": 2e6, "num_key_value_heads": 4,
                  "tie_word_embeddings": True}),
})  # fmt: skip
"""By `architectures` of config.json. What GGUF calls llama are Llama, Mistral and Mixtral."""


def find_hf_architecture(config: Section) -> HFArchitecture:
    """The class that a config.json names; UnsupportedModelError lists those there are."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in HF_ARCHITECTURES:
        raise UnsupportedModelError("unsupported model class", where=config.where, got=repr(name),
                                    wanted=" or ".join(HF_ARCHITECTURES))
    return HF_ARCHITECTURES[name]
