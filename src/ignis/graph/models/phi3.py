"""phi3: llama's layer with q, k and v in one matrix and gate and up in another, and neox rope.

Models of long contexts bring frequency factors twice: for contexts up to the length they were
first trained on, and for longer ones.
"""

from __future__ import annotations

from ignis.graph.ir import Value
from ignis.graph.models.architecture import Architecture
from ignis.graph.models.blocks import attention
from ignis.graph.models.lowering import Lowering


def layer(m: Lowering, i: int, x: Value) -> Value:
    """Attention, then feed-forward, each on the normalized stream and added to it."""
    x = m.b.add(x, _attention(m, i, m.norm(x, f"blk.{i}.attn_norm")))
    return m.b.add(x, _feed_forward(m, i, m.norm(x, f"blk.{i}.ffn_norm")))


def _attention(m: Lowering, i: int, x: Value) -> Value:
    c, blk = m.config, f"blk.{i}"
    n_query, n_key = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    qkv = m.linear(x, f"{blk}.attn_qkv", n_query + 2 * n_key)
    q = m.b.columns(qkv, first=0, width=n_query)
    k = m.b.columns(qkv, first=n_query, width=n_key)
    v = m.b.columns(qkv, first=n_query + n_key, width=n_key)
    attended = attention(m, i, m.rope(q, i), m.rope(k, i), v)
    return m.linear(attended, f"{blk}.attn_output", c.n_embd)


def _feed_forward(m: Lowering, i: int, x: Value) -> Value:
    """SwiGLU; `ffn_up` holds the gate's rows, then those of up."""
    c, blk = m.config, f"blk.{i}"
    both = m.linear(x, f"{blk}.ffn_up", 2 * c.n_ff)
    gate = m.b.columns(both, first=0, width=c.n_ff)
    up = m.b.columns(both, first=c.n_ff, width=c.n_ff)
    return m.linear(m.b.mul(m.b.silu(gate), up), f"{blk}.ffn_down", c.n_embd)


PHI3 = Architecture(
    "phi3",
    rope_style="neox",
    layer=layer,
    honours=frozenset({"attention.sliding_window"}),
)
