"""qwen3: llama's layer with norms on the heads of q and k, and neox rope."""

from __future__ import annotations

from ignis.graph.ir import Value
from ignis.graph.models.architecture import Architecture
from ignis.graph.models.blocks import feed_forward, self_attention
from ignis.graph.models.lowering import Lowering


def layer(m: Lowering, i: int, x: Value) -> Value:
    """Attention with normalized heads, then feed-forward."""
    attended = self_attention(m, i, m.norm(x, f"blk.{i}.attn_norm"), head_norms=True)
    x = m.b.add(x, attended)
    return m.b.add(x, feed_forward(m, i, m.norm(x, f"blk.{i}.ffn_norm")))


QWEN3 = Architecture("qwen3", rope_style="neox", layer=layer)
