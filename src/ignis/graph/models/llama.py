"""llama and mistral: pre-norm, grouped-query attention, SwiGLU; biases where the file has them.

GGUF stores the rows of q and k permuted for interleaved rope. Llama 3.1 and later bring
frequency factors as the tensor `rope_freqs.weight`. Mistral files call themselves llama; those of
the first version see a sliding window.
"""

from __future__ import annotations

from ignis.graph.ir import Value
from ignis.graph.models.architecture import Architecture
from ignis.graph.models.blocks import feed_forward, self_attention
from ignis.graph.models.lowering import Lowering


def layer(m: Lowering, i: int, x: Value) -> Value:
    """Attention, then feed-forward, each on the normalized stream and added to it."""
    x = m.b.add(x, self_attention(m, i, m.norm(x, f"blk.{i}.attn_norm")))
    return m.b.add(x, feed_forward(m, i, m.norm(x, f"blk.{i}.ffn_norm")))


LLAMA = Architecture(
    "llama",
    rope_style="interleaved",
    layer=layer,
    honours=frozenset({"attention.sliding_window"}),
)
