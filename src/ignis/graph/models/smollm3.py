"""smollm3: llama's layer, but every fourth has no rope (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

from ignis.graph.ir import Value
from ignis.graph.models.architecture import Architecture
from ignis.graph.models.blocks import feed_forward, self_attention
from ignis.graph.models.lowering import Lowering

_NO_ROPE_STEP = 4  # no key of the file says it


def layer(m: Lowering, i: int, x: Value) -> Value:
    """Attention, with rope in three layers of four, then feed-forward."""
    rope = (i + 1) % _NO_ROPE_STEP != 0
    x = m.b.add(x, self_attention(m, i, m.norm(x, f"blk.{i}.attn_norm"), rope=rope))
    return m.b.add(x, feed_forward(m, i, m.norm(x, f"blk.{i}.ffn_norm")))


SMOLLM3 = Architecture("smollm3", rope_style="interleaved", layer=layer)
