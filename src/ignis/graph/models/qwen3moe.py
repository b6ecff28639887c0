"""qwen3moe: qwen3's attention, and experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignis.graph.ir import Value
from ignis.graph.models import experts
from ignis.graph.models.architecture import Architecture
from ignis.graph.models.blocks import self_attention
from ignis.graph.models.lowering import Lowering

if TYPE_CHECKING:
    from ignis.graph.models.config import ModelConfig


def layer(m: Lowering, i: int, x: Value) -> Value:
    """Attention with normalized heads, then experts."""
    attended = self_attention(m, i, m.norm(x, f"blk.{i}.attn_norm"), head_norms=True)
    x = m.b.add(x, attended)
    return experts.expert_feed_forward(m, i, m.norm(x, f"blk.{i}.ffn_norm"), x)


def complete(config: ModelConfig) -> ModelConfig:
    """Gates add up to one; the experts of a token have the hidden width of the model together."""
    n_used = experts.needed(config).n_used
    return experts.complete(config, normalized=True, n_ff=config.n_ff // n_used)


QWEN3MOE = Architecture(
    "qwen3moe", rope_style="neox", layer=layer, honours=experts.EXPERT_KEYS, complete=complete
)
