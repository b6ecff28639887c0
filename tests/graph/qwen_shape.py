"""The shape of Qwen2.5-0.5B, whose figures the architecture page derives; no weights needed."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from ignis.graph.ir import Graph
from ignis.graph.models import ModelConfig, build_graph

QWEN2_05B = ModelConfig(
    architecture="qwen2",
    n_layers=24,
    n_embd=896,
    n_heads=14,
    n_kv_heads=2,
    head_dim=64,
    n_ff=4864,
    n_vocab=151936,
    n_ctx_train=32768,
    norm_eps=1e-6,
    rope_base=1e6,
    rope_dim=64,
    rope_style="neox",
    tied_output=True,
    source="qwen2.5-0.5b.gguf",
)


@dataclass(frozen=True)
class FakeTensor:
    """What lowering sees of a tensor."""

    shape: tuple[int, ...]
    format: SimpleNamespace


def tensor(*shape: int, dtype: str = "f32") -> FakeTensor:
    return FakeTensor(shape, SimpleNamespace(name=dtype))


def decoder_tensors(c: ModelConfig, dtype: str = "q8_0") -> dict[str, FakeTensor]:
    """All tensors of a decoder, as its architecture has them."""
    n_query, n_key = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    tensors = {
        "token_embd.weight": tensor(c.n_vocab, c.n_embd, dtype=dtype),
        "output_norm.weight": tensor(c.n_embd),
    }
    if not c.tied_output:
        tensors["output.weight"] = tensor(c.n_vocab, c.n_embd, dtype=dtype)
    for i in range(c.n_layers):
        matrices: dict[str, tuple[int, ...]] = {
            "attn_q": (n_query, c.n_embd),
            "attn_k": (n_key, c.n_embd),
            "attn_v": (n_key, c.n_embd),
            "attn_output": (c.n_embd, n_query),
            "ffn_gate": (c.n_ff, c.n_embd),
            "ffn_up": (c.n_ff, c.n_embd),
            "ffn_down": (c.n_embd, c.n_ff),
        }
        if c.architecture == "phi3":
            for name in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
                del matrices[name]
            matrices |= {
                "attn_qkv": (n_query + 2 * n_key, c.n_embd),
                "ffn_up": (2 * c.n_ff, c.n_embd),
            }
        if c.experts is not None:
            matrices = {n: s for n, s in matrices.items() if not n.startswith("ffn")}
            matrices |= expert_matrices(c)
            if c.experts.n_ff_shared is not None:
                tensors[f"blk.{i}.ffn_gate_inp_shexp.weight"] = tensor(c.n_embd)
        for name, shape in matrices.items():
            tensors[f"blk.{i}.{name}.weight"] = tensor(*shape, dtype=dtype)
            if c.architecture in ("qwen2", "qwen2moe") and name in ("attn_q", "attn_k", "attn_v"):
                tensors[f"blk.{i}.{name}.bias"] = tensor(shape[0])
        norms = dict.fromkeys(("attn_norm", "ffn_norm"), c.n_embd)
        if c.architecture.startswith("gemma"):
            norms |= dict.fromkeys(("post_attention_norm", "post_ffw_norm"), c.n_embd)
        if c.architecture in ("qwen3", "qwen3moe", "gemma3"):
            norms |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), c.head_dim)
        for name, width in norms.items():
            tensors[f"blk.{i}.{name}.weight"] = tensor(width)
    return tensors


def expert_matrices(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The matrices of a layer's router, experts and shared expert."""
    assert c.experts is not None and c.experts.n_ff is not None
    found: dict[str, tuple[int, ...]] = {"ffn_gate_inp": (c.experts.n_experts, c.n_embd)}
    for suffix, first, n_ff in (
        ("_exps", (c.experts.n_experts,), c.experts.n_ff), ("_shexp", (), c.experts.n_ff_shared)
    ):  # fmt: skip
        if n_ff is not None:
            found |= {f"ffn_{name}{suffix}": (*first, n_ff, c.n_embd) for name in ("gate", "up")}
            found[f"ffn_down{suffix}"] = (*first, c.n_embd, n_ff)
    return found


def qwen2_graph() -> Graph:
    return build_graph(QWEN2_05B, decoder_tensors(QWEN2_05B))
