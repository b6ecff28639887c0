"""gemma2: norms before and after each branch, GELU, capped scores and logits, local layers.

The embedding is scaled by the root of its width. Every second layer sees a sliding window. Files
keep the norms' gains with the 1 added that the paper's formula has.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ignis.graph.ir import Value
from ignis.graph.models.architecture import Architecture
from ignis.graph.models.blocks import feed_forward, self_attention
from ignis.graph.models.lowering import Lowering

if TYPE_CHECKING:
    from ignis.graph.models.config import ModelConfig

_LAYERS_OF_27B = 46


def layer(m: Lowering, i: int, x: Value, *, head_norms: bool = False) -> Value:
    """Attention and feed-forward, each branch normalized before it is added too."""
    blk = f"blk.{i}"
    branch = self_attention(m, i, m.norm(x, f"{blk}.attn_norm"), head_norms=head_norms)
    x = m.b.add(m.norm(branch, f"{blk}.post_attention_norm"), x)
    branch = feed_forward(m, i, m.norm(x, f"{blk}.ffn_norm"), activation="gelu")
    return m.b.add(m.norm(branch, f"{blk}.post_ffw_norm"), x)


def complete(config: ModelConfig) -> ModelConfig:
    """The embedding's scale, and the scores' scale of the largest model: files rarely tell them."""
    return with_gemma_scales(config, _LAYERS_OF_27B)


def with_gemma_scales(config: ModelConfig, layers_of_27b: int) -> ModelConfig:
    """Embeddings times sqrt(D); the 27B model scales scores by the width that a head would have."""
    config = config._replace(embedding_scale=math.sqrt(config.n_embd))
    if config.n_layers == layers_of_27b and config.attention_scale is None:
        scale = 1.0 / math.sqrt(config.n_embd // config.n_heads)
        config = config._replace(attention_scale=scale)
    return config


GEMMA2 = Architecture(
    "gemma2",
    rope_style="neox",
    layer=layer,
    honours=frozenset(
        {
            "attention.scale",
            "attention.sliding_window",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        }
    ),
    window_pattern=2,
    complete=complete,
)
