"""qwen2: llama's layer with biases on q, k and v, and neox rope."""

from __future__ import annotations

from ignis.graph.ir import Value
from ignis.graph.models.architecture import Architecture
from ignis.graph.models.blocks import feed_forward, self_attention
from ignis.graph.models.lowering import Lowering


def layer(m: Lowering, i: int, x: Value) -> Value:
    """Attention with biases, then feed-forward."""
    attended = self_attention(m, i, m.norm(x, f"blk.{i}.attn_norm"), qkv_bias=True)
    x = m.b.add(x, attended)
    return m.b.add(x, feed_forward(m, i, m.norm(x, f"blk.{i}.ffn_norm")))


QWEN2 = Architecture("qwen2", rope_style="neox", layer=layer)
