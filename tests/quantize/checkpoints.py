"""Small random Hugging Face checkpoints of every architecture, written by hand.

    folder = write_checkpoint(tmp_path / "model", "llama")

config.json comes in the older form (rope_theta, rope_scaling) or the newer one (rope_parameters);
the tokenizer is byte-level BPE of the committed test vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ignis.gguf import open_gguf
from tests.text.vocabularies import TINY

Tensors = dict[str, NDArray[Any]]
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}

_BASE: Mapping[str, Any] = {
    "vocab_size": 704, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "bos_token_id": 656, "eos_token_id": 658, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
          "query_pre_attn_scalar": 16, "sliding_window": 9}

KINDS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType({
    "llama": ("LlamaForCausalLM", {}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("LlamaForCausalLM", {"rope_scaling": _LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 9}),
    "mixtral": ("MixtralForCausalLM", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": False, "tie_word_embeddings": True}),
    "qwen2moe": ("Qwen2MoeForCausalLM", {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64, "sliding_window": 0}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3moe": ("Qwen3MoeForCausalLM", {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "gemma2": ("Gemma2ForCausalLM", {
        **_GEMMA, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3ForCausalLM", {
        **_GEMMA, "num_hidden_layers": 7, "rope_theta": 1e6, "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3-layers": ("Gemma3ForCausalLM", {
        **_GEMMA, "layer_types": ["full_attention", "sliding_attention"]}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 9}),
    "phi3-partial": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.75, "head_dim": 32}),
    "granite": ("GraniteForCausalLM", {
        "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "logits_scaling": 4.0,
        "attention_multiplier": 0.09}),
    "smollm3": ("SmolLM3ForCausalLM", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
})  # fmt: skip


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a kind, in the older form."""
    architecture, values = KINDS[kind]
    return {**_BASE, "architectures": [architecture], **values, **changes}


def in_newer_form(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same as transformers 5 writes it: all of rope in `rope_parameters`."""
    new = dict(config)
    rope = {"rope_type": "default", "rope_theta": new.pop("rope_theta"),
            **new.pop("rope_scaling", {})}
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    if "partial_rotary_factor" in new:
        rope["partial_rotary_factor"] = new.pop("partial_rotary_factor")
    if (base := new.pop("rope_local_base_freq", None)) is not None:
        local = {"rope_type": "default", "rope_theta": base}
        rope = {"full_attention": rope, "sliding_attention": local}
    return {**new, "rope_parameters": rope}


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Weights by their names in checkpoints, float32."""
    rng = np.random.default_rng(seed)
    name = config["architectures"][0]
    width, head = config["hidden_size"], config["head_dim"]
    n_query, n_key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors: Tensors = {}

    def matrix(key: str, n_rows: int, n_columns: int, bias: bool = False) -> None:
        values = rng.normal(0, 1.5 / np.sqrt(n_columns), (n_rows, n_columns))
        tensors[f"{key}.weight"] = values.astype(np.float32)
        if bias:
            tensors[f"{key}.bias"] = rng.normal(0, 0.5, n_rows).astype(np.float32)

    def norm(key: str, n: int = width) -> None:
        mean = 0.0 if "Gemma" in name else 1.0
        tensors[f"{key}.weight"] = rng.normal(mean, 0.2, n).astype(np.float32)

    matrix("model.embed_tokens", config["vocab_size"], width)
    norm("model.norm")
    for i in range(config["num_hidden_layers"]):
        blk = f"model.layers.{i}"
        bias = config.get("attention_bias", False)
        if "Phi3" in name:
            matrix(f"{blk}.self_attn.qkv_proj", n_query + 2 * n_key, width)
        else:
            for part, n in (("q", n_query), ("k", n_key), ("v", n_key)):
                matrix(f"{blk}.self_attn.{part}_proj", n, width, bias or "Qwen2" in name)
        matrix(f"{blk}.self_attn.o_proj", width, n_query, bias)
        for key, n_rows, n_columns in feed_forward(config):
            matrix(f"{blk}.{key}", n_rows, n_columns, config.get("mlp_bias", False))
        if "Qwen3" in name or "Gemma3" in name:
            norm(f"{blk}.self_attn.q_norm", head)
            norm(f"{blk}.self_attn.k_norm", head)
        gemma = ("pre_feedforward", "post_feedforward") if "Gemma" in name else ()
        for part in ("input", "post_attention", *gemma):
            norm(f"{blk}.{part}_layernorm")
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], width)
    return tensors


def feed_forward(config: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Name, rows and columns of each matrix in a layer's feed-forward."""
    name, width = config["architectures"][0], config["hidden_size"]
    hidden = config["intermediate_size"]

    def gated(prefix: str, n: int, parts: str = "gate_proj up_proj down_proj"
              ) -> Iterator[tuple[str, int, int]]:
        gate, up, down = (f"{prefix}.{part}" for part in parts.split())
        yield from ((gate, n, width), (up, n, width), (down, width, n))

    if "Phi3" in name:
        yield from (("mlp.gate_up_proj", 2 * hidden, width), ("mlp.down_proj", width, hidden))
    elif "Mixtral" in name:
        yield "block_sparse_moe.gate", config["num_local_experts"], width
        for i in range(config["num_local_experts"]):
            yield from gated(f"block_sparse_moe.experts.{i}", hidden, "w1 w3 w2")
    elif "Moe" in name:
        yield "mlp.gate", config["num_experts"], width
        for i in range(config["num_experts"]):
            yield from gated(f"mlp.experts.{i}", config["moe_intermediate_size"])
        if "Qwen2" in name:
            yield from gated("mlp.shared_expert", config["shared_expert_intermediate_size"])
            yield "mlp.shared_expert_gate", 1, width
    else:
        yield from gated("mlp", hidden)


def split(pattern: str) -> dict[str, Any]:
    """A step of a pre-tokenizer in tokenizer.json."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
            "invert": False}


def byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


@cache
def _tiny() -> tuple[list[str], list[str], list[int]]:
    with open_gguf(TINY) as file:
        values = [file.metadata[f"tokenizer.ggml.{key}"] for key in
                  ("tokens", "merges", "token_type")]
        return [*values[0]], [*values[1]], [int(kind) for kind in values[2]]


def tokenizer_json(pre_tokenizer: Any = None, *, pairs: bool = False, **model: Any
                   ) -> dict[str, Any]:
    """The committed byte-level vocabulary as a tokenizer.json; `pairs`: merges as lists."""
    tokens, merges, kinds = _tiny()
    added = [{"id": i, "content": tokens[i], "special": True}
             for i, kind in enumerate(kinds) if kind == 3]
    vocab = {text: i for i, text in enumerate(tokens) if kinds[i] == 1}
    return {
        "added_tokens": added, "normalizer": None, "post_processor": byte_level(True),
        "pre_tokenizer": byte_level(True) if pre_tokenizer is None else pre_tokenizer,
        "decoder": byte_level(True),
        "model": {"type": "BPE", "vocab": vocab, "byte_fallback": False, "ignore_merges": False,
                  "merges": [m.split(" ") for m in merges] if pairs else merges, **model},
    }  # fmt: skip


def write_checkpoint(folder: Path, kind: str = "llama", *, dtype: str = "f32", n_shards: int = 1,
                     newer: bool = False, **changes: Any) -> Path:
    """Write a checkpoint; `changes` are of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(kind, **changes)
    write_json(folder / "config.json", in_newer_form(config) if newer else config)
    write_json(folder / "tokenizer.json", tokenizer_json())
    write_json(folder / "tokenizer_config.json",
               {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"})
    save_tensors(folder, random_tensors(config), dtype, n_shards)
    return folder


def save_tensors(folder: Path, tensors: Mapping[str, NDArray[Any]], dtype: str = "f32",
                 n_shards: int = 1) -> None:
    """The tensors in one file, or in several with an index."""
    stored = {name: values.astype(DTYPES[dtype]) for name, values in tensors.items()}
    if n_shards == 1:
        save_file(stored, folder / "model.safetensors")
        return
    weight_map = {}
    for index in range(n_shards):
        file = f"model-{index + 1:05}-of-{n_shards:05}.safetensors"
        part = dict([*stored.items()][index::n_shards])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
