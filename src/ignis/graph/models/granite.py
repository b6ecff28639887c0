"""granite: llama's layer with the branches scaled before they are added, and scales all over.

Embeddings, scores and logits have scales of their own, which the file names.
"""

from __future__ import annotations

from ignis.graph.ir import Value
from ignis.graph.models.architecture import Architecture
from ignis.graph.models.blocks import feed_forward, self_attention
from ignis.graph.models.lowering import Lowering


def layer(m: Lowering, i: int, x: Value) -> Value:
    """Attention, then feed-forward, each scaled and added to the stream."""
    scale = m.config.residual_scale
    branch = self_attention(m, i, m.norm(x, f"blk.{i}.attn_norm"))
    x = m.b.add(x, m.scale_by(branch, scale))
    branch = feed_forward(m, i, m.norm(x, f"blk.{i}.ffn_norm"))
    return m.b.add(x, m.scale_by(branch, scale))


GRANITE = Architecture(
    "granite",
    rope_style="interleaved",
    layer=layer,
    honours=frozenset({"embedding_scale", "residual_scale", "logit_scale", "attention.scale"}),
    neutral=(("rope.scaling.finetuned", True),),  # False would switch rope off
)
