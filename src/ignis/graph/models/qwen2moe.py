"""qwen2moe: qwen2's attention, experts, and one that all tokens share, with a gate of its own."""

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
    """Attention with biases, then experts."""
    attended = self_attention(m, i, m.norm(x, f"blk.{i}.attn_norm"), qkv_bias=True)
    x = m.b.add(x, attended)
    return experts.expert_feed_forward(m, i, m.norm(x, f"blk.{i}.ffn_norm"), x)


def complete(config: ModelConfig) -> ModelConfig:
    """Gates are probabilities among all experts; the shared one has the model's hidden width."""
    n_used = experts.needed(config).n_used
    return experts.complete(
        config, normalized=False, n_ff=config.n_ff // n_used, n_ff_shared=config.n_ff
    )


QWEN2MOE = Architecture(
    "qwen2moe",
    rope_style="neox",
    layer=layer,
    honours=experts.EXPERT_KEYS | {"expert_shared_feed_forward_length"},
    neutral=(("expert_shared_count", 1),),
    complete=complete,
)
