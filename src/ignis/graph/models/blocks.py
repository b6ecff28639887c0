"""The blocks that architectures share."""

from __future__ import annotations

from ignis.graph.ir import Value
from ignis.graph.ir.kv_types import DEFAULT_KV_TYPE
from ignis.graph.models.lowering import Lowering


def self_attention(
    m: Lowering,
    i: int,
    x: Value,
    *,
    qkv_bias: bool = False,
    head_norms: bool = False,
    rope: bool = True,
) -> Value:
    """Grouped-query attention with rope on the normalized stream; a matmul at its end.

    `qkv_bias` demands biases on q, k and v; otherwise they are used where the file has them.
    `head_norms` normalizes each head of q and k; without `rope` nothing tells positions apart.
    """
    c, blk = m.config, f"blk.{i}"
    n_query, n_key = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    q = m.linear(x, f"{blk}.attn_q", n_query, needs_bias=qkv_bias)
    k = m.linear(x, f"{blk}.attn_k", n_key, needs_bias=qkv_bias)
    v = m.linear(x, f"{blk}.attn_v", n_key, needs_bias=qkv_bias)
    if head_norms:
        q, k = m.head_norm(q, f"{blk}.attn_q_norm"), m.head_norm(k, f"{blk}.attn_k_norm")
    if rope:
        q, k = m.rope(q, i), m.rope(k, i)
    return m.linear(attention(m, i, q, k, v), f"{blk}.attn_output", c.n_embd)


def attention(m: Lowering, i: int, q: Value, k: Value, v: Value) -> Value:
    """Attention of layer i as the model's numbers say: scale, window, cap, type of the cache."""
    c = m.config
    limits: dict[str, int | float | str] = {}
    if c.window is not None and i in c.local_layers:
        limits["window"] = c.window
    if c.attention_softcap is not None:
        limits["softcap"] = c.attention_softcap
    if c.kv_type != DEFAULT_KV_TYPE:
        limits["kv_type"] = c.kv_type
    return m.b.attention(
        q,
        k,
        v,
        layer=i,
        n_heads=c.n_heads,
        n_kv_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        scale=c.score_scale,
        **limits,
    )


def feed_forward(
    m: Lowering,
    i: int,
    x: Value,
    *,
    activation: str = "silu",
    n_ff: int | None = None,
    suffix: str = "",
) -> Value:
    """The gated block on the normalized stream: `activation` is "silu" or "gelu".

    `n_ff` is its hidden width, if not the model's; `suffix` ends the names of its tensors.
    """
    blk, n_ff = f"blk.{i}", n_ff or m.config.n_ff
    gate = m.linear(x, f"{blk}.ffn_gate{suffix}", n_ff)
    up = m.linear(x, f"{blk}.ffn_up{suffix}", n_ff)
    gated = m.b.gelu(gate) if activation == "gelu" else m.b.silu(gate)
    return m.linear(m.b.mul(gated, up), f"{blk}.ffn_down{suffix}", m.config.n_embd)
