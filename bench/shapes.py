"""The shapes of real models, whose files are filled with random weights.

How long a step takes depends on shapes and formats, not on what the weights say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Rope frequencies of Llama 3.1 and later, stretched for a longer context."""

    factor: float = 32.0
    low: float = 1.0
    high: float = 4.0
    n_ctx: int = 8192  # before stretching

    def factors(self, n_rot: int, base: float) -> NDArray[np.float32]:
        """What each frequency is divided by, f32 [n_rot/2]."""
        n_turns = self.n_ctx * base ** (-np.arange(0, n_rot, 2) / n_rot) / (2 * math.pi)
        smooth = np.clip((n_turns - self.low) / (self.high - self.low), 0, 1)
        factors: NDArray[np.float32] = (1 / ((1 - smooth) / self.factor + smooth)).astype("f4")
        return factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a decoder's file consists of. `vocabulary` names the file that tokens come from."""

    name: str
    architecture: str
    vocabulary: str
    n_vocab: int
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    n_ff: int
    n_ctx: int
    rope_base: float
    norm_eps: float
    scaling: Llama3Scaling | None = None

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_heads

    def hyperparameters(self) -> dict[str, int | float]:
        """Metadata by key, without the architecture's prefix."""
        return {
            "block_count": self.n_layers,
            "context_length": self.n_ctx,
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "attention.layer_norm_rms_epsilon": self.norm_eps,
            "rope.freq_base": self.rope_base,
            "rope.dimension_count": self.head_dim,
            "vocab_size": self.n_vocab,
        }

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Name, rows and columns of every matrix; the output is the embedding, as in the files."""
        n_query, n_key = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        yield "token_embd.weight", self.n_vocab, self.n_embd
        for i in range(self.n_layers):
            yield f"blk.{i}.attn_q.weight", n_query, self.n_embd
            yield f"blk.{i}.attn_k.weight", n_key, self.n_embd
            yield f"blk.{i}.attn_v.weight", n_key, self.n_embd
            yield f"blk.{i}.attn_output.weight", self.n_embd, n_query
            yield f"blk.{i}.ffn_gate.weight", self.n_ff, self.n_embd
            yield f"blk.{i}.ffn_up.weight", self.n_ff, self.n_embd
            yield f"blk.{i}.ffn_down.weight", self.n_embd, self.n_ff

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Name and length of every gain (`.weight`) and bias (`.bias`)."""
        n_query, n_key = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        yield "output_norm.weight", self.n_embd
        for i in range(self.n_layers):
            yield f"blk.{i}.attn_norm.weight", self.n_embd
            yield f"blk.{i}.ffn_norm.weight", self.n_embd
            if self.architecture == "qwen2":
                yield f"blk.{i}.attn_q.bias", n_query
                yield f"blk.{i}.attn_k.bias", n_key
                yield f"blk.{i}.attn_v.bias", n_key


_ALL = (
    Shape(
        name="qwen2.5-0.5b", architecture="qwen2", vocabulary="qwen2", n_vocab=151936,
        n_layers=24, n_embd=896, n_heads=14, n_kv_heads=2, n_ff=4864, n_ctx=32768,
        rope_base=1e6, norm_eps=1e-6,
    ),
    Shape(
        name="qwen2.5-1.5b", architecture="qwen2", vocabulary="qwen2", n_vocab=151936,
        n_layers=28, n_embd=1536, n_heads=12, n_kv_heads=2, n_ff=8960, n_ctx=32768,
        rope_base=1e6, norm_eps=1e-6,
    ),
    Shape(
        name="llama3.2-1b", architecture="llama", vocabulary="llama-bpe", n_vocab=128256,
        n_layers=16, n_embd=2048, n_heads=32, n_kv_heads=8, n_ff=8192, n_ctx=131072,
        rope_base=5e5, norm_eps=1e-5, scaling=Llama3Scaling(),
    ),
)  # fmt: skip

SHAPES: Mapping[str, Shape] = MappingProxyType({shape.name: shape for shape in _ALL})
