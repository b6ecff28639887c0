"""llama, mistral, mixtral: pre-norm, grouped-query attention, SwiGLU; biases where a file has them.

GGUF stores the rows of q and k permuted for interleaved rope. Llama 3.1 and later bring
frequency factors as the tensor `rope_freqs.weight`. Mistral files call themselves llama; those of
the first version see a sliding window. So do Mixtral files: they have experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignis.graph.ir import Value
from ignis.graph.models import experts
from ignis.graph.models.architecture import Architecture
from ignis.graph.models.blocks import feed_forward, self_attention
from ignis.graph.models.lowering import Lowering

if TYPE_CHECKING:
    from ignis.graph.models.config import ModelConfig


def layer(m: Lowering, i: int, x: Value) -> Value:
    """Attention, then feed-forward or experts, on the normalized stream and added to it."""
    x = m.b.add(x, self_attention(m, i, m.norm(x, f"blk.{i}.attn_norm")))
    normed = m.norm(x, f"blk.{i}.ffn_norm")
    if m.config.experts is not None:
        return experts.expert_feed_forward(m, i, normed, x)
    return m.b.add(x, feed_forward(m, i, normed))


def complete(config: ModelConfig) -> ModelConfig:
    """Mixtral's experts have the hidden width of the model, and gates that add up to one."""
    if config.experts is None:
        return config
    return experts.complete(config, normalized=True, n_ff=config.n_ff)


LLAMA = Architecture(
    "llama",
    rope_style="interleaved",
    layer=layer,
    honours=frozenset({"attention.sliding_window"}) | experts.EXPERT_KEYS,
    complete=complete,
)
