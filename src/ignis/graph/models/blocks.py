"""The blocks that architectures share."""

from __future__ import annotations

import math

from ignis.graph.ir import Value
from ignis.graph.models.lowering import Lowering


def self_attention(m: Lowering, i: int, x: Value, *, qkv_bias: bool = False) -> Value:
    """Grouped-query attention with rope on the normalized stream; a matmul at its end.

    `qkv_bias` demands biases on q, k and v; otherwise they are used where the file has them.
    """
    c, blk = m.config, f"blk.{i}"
    n_query, n_key = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    q = m.linear(x, f"{blk}.attn_q", n_query, needs_bias=qkv_bias)
    k = m.linear(x, f"{blk}.attn_k", n_key, needs_bias=qkv_bias)
    v = m.linear(x, f"{blk}.attn_v", n_key, needs_bias=qkv_bias)
    attended = m.b.attention(
        m.rope(q),
        m.rope(k),
        v,
        layer=i,
        n_heads=c.n_heads,
        n_kv_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        scale=1.0 / math.sqrt(c.head_dim),  # IEEE square root and division: the same everywhere
    )
    return m.linear(attended, f"{blk}.attn_output", c.n_embd)


def feed_forward(m: Lowering, i: int, x: Value) -> Value:
    """The SwiGLU block on the normalized stream."""
    c, blk = m.config, f"blk.{i}"
    gate = m.linear(x, f"{blk}.ffn_gate", c.n_ff)
    up = m.linear(x, f"{blk}.ffn_up", c.n_ff)
    return m.linear(m.b.mul(m.b.silu(gate), up), f"{blk}.ffn_down", c.n_embd)
