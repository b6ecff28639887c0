"""Small random models of every architecture, complete with a vocabulary, as GGUF files.

    path = write_random_model(tmp_path / "m.gguf", architecture="qwen2", formats=("q8_0", "f16"))

The same options and seed give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bench.random_blocks import random_weights
from ignis.gguf import BLOCKS, GGUFWriter
from ignis.text.bytelevel import to_characters

BLOCK_FORMATS = ("q8_0", "q4_0", "q4_1")
FLOAT_FORMATS = ("f32", "f16", "bf16")
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    "t h", "i n", "e r", "a n", "o n", "r e", "th e", "e n", "a t", "o r", "in g", "an d",
    "Ġ t", "Ġ a", "Ġ the", "Ġ s", "Ġ w", "Ġ o", "o u", "i s", "i t", "e s", "Ġ c", "Ġ b",
    "Ġ in", "Ġ an d", "Ġ f", "l l", "Ġt h", "a r", "e d", "Ġ p", "l e", "Ġ m", "o f", "Ġ of",
    "Ċ Ċ", "u s", "Ġ d", "a l", "y o",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """The options of a model. Each matrix draws its format from `formats`."""

    architecture: str = "llama"
    formats: tuple[str, ...] = ("q8_0",)
    n_layers: int = 2
    n_embd: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 32
    n_ff: int = 96
    n_experts: int = 0
    n_used: int = 2
    n_ff_expert: int = 64
    n_ff_shared: int = 96
    n_ctx: int = 1024
    rope_base: float = 10000.0
    rope_dim: int | None = None  # the whole head
    rope_factors: bool = False
    tied: bool = True
    biases: bool | None = None  # on q, k and v; as the architecture has them
    pre_tokenizer: str = "qwen2"
    keys: Mapping[str, float | int | str] = field(default_factory=dict, hash=False)
    """More hyperparameters, without the architecture's name: {"attention.sliding_window": 20}."""
    seed: int = 0

    @property
    def is_gemma(self) -> bool:
        return self.architecture.startswith("gemma")

    @property
    def has_head_norms(self) -> bool:
        return self.architecture in ("qwen3", "qwen3moe", "gemma3")

    @property
    def has_shared_expert(self) -> bool:
        return self.architecture == "qwen2moe"

    @property
    def has_biases(self) -> bool:
        return self.architecture in ("qwen2", "qwen2moe") if self.biases is None else self.biases

    def write(self, path: Path) -> Path:
        """Write the model as a GGUF file and return its path."""
        writer = GGUFWriter(path, self.architecture)
        tokens = vocabulary()
        self._add_hyperparameters(writer)
        _add_vocabulary(writer, tokens, self.pre_tokenizer)
        self._add_tensors(writer, len(tokens))
        writer.write()
        return path

    def _add_hyperparameters(self, writer: GGUFWriter) -> None:
        values: dict[str, int | float | str] = {
            "block_count": self.n_layers,
            "context_length": self.n_ctx,
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": self.rope_base,
            "rope.dimension_count": self.rope_dim or self.head_dim,
        }
        if self.n_experts:
            values |= {"expert_count": self.n_experts, "expert_used_count": self.n_used,
                       "expert_feed_forward_length": self.n_ff_expert}  # fmt: skip
        if self.has_shared_expert:
            values["expert_shared_feed_forward_length"] = self.n_ff_shared
        writer.add("general.name", f"random {self.architecture}")
        for key, value in (values | dict(self.keys)).items():
            writer.add(f"{self.architecture}.{key}", value)

    def _add_tensors(self, writer: GGUFWriter, n_vocab: int) -> None:
        rng = np.random.default_rng(self.seed)

        def matrix(name: str, *shape: int) -> None:
            weights = rng.normal(0, 1.5 / np.sqrt(shape[-1]), shape)
            chosen = self.formats[int(rng.integers(len(self.formats)))]
            if BLOCKS[chosen].encodable:
                writer.add_tensor(f"{name}.weight", weights.astype(np.float32), chosen)
            else:
                n_rows = math.prod(shape[:-1])
                raw = random_weights(f"{name} {self.seed}", n_rows, shape[-1], chosen)
                writer.add_raw_tensor(f"{name}.weight", shape, chosen, raw)

        def vector(name: str, n: int | tuple[int, ...], mean: float, deviation: float) -> None:
            writer.add_tensor(name, rng.normal(mean, deviation, n).astype(np.float32), "f32")

        matrix("token_embd", n_vocab, self.n_embd)
        if not self.tied:
            matrix("output", n_vocab, self.n_embd)
        vector("output_norm.weight", self.n_embd, 1, 0.2)
        if self.rope_factors:
            factors = np.linspace(1, 8, (self.rope_dim or self.head_dim) // 2)
            writer.add_tensor("rope_freqs.weight", factors.astype(np.float32), "f32")
        if self.keys.get("rope.scaling.type") == "longrope":
            for name, last in (("short", 1.5), ("long", 20)):
                factors = np.linspace(1, last, (self.rope_dim or self.head_dim) // 2)
                writer.add_tensor(f"rope_factors_{name}.weight", factors.astype(np.float32), "f32")
        for i in range(self.n_layers):
            self._add_layer(f"blk.{i}", matrix, vector)

    def _add_layer(
        self, blk: str, matrix: Callable[..., None], vector: Callable[..., None]
    ) -> None:
        n_query, n_key = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        if self.architecture == "phi3":
            matrix(f"{blk}.attn_qkv", n_query + 2 * n_key, self.n_embd)
        else:
            for name, n in (("attn_q", n_query), ("attn_k", n_key), ("attn_v", n_key)):
                matrix(f"{blk}.{name}", n, self.n_embd)
                if self.has_biases:
                    vector(f"{blk}.{name}.bias", n, 0, 0.5)
        matrix(f"{blk}.attn_output", self.n_embd, n_query)
        if self.n_experts:
            self._add_experts(blk, matrix, vector)
        elif self.architecture == "phi3":
            matrix(f"{blk}.ffn_up", 2 * self.n_ff, self.n_embd)
            matrix(f"{blk}.ffn_down", self.n_embd, self.n_ff)
        else:
            self._add_feed_forward(f"{blk}.ffn", "", (), self.n_ff, matrix)
        names = ["attn_norm", "ffn_norm"]
        if self.is_gemma:
            names += ["post_attention_norm", "post_ffw_norm"]
        for name in names:
            vector(f"{blk}.{name}.weight", self.n_embd, 1, 0.2)
        if self.has_head_norms:
            for name in ("attn_q_norm", "attn_k_norm"):
                vector(f"{blk}.{name}.weight", self.head_dim, 1, 0.2)


    def _add_experts(
        self, blk: str, matrix: Callable[..., None], vector: Callable[..., None]
    ) -> None:
        # As converters do: what decides about experts stays f32.
        vector(f"{blk}.ffn_gate_inp.weight", (self.n_experts, self.n_embd), 0, 0.3)
        n_experts = (self.n_experts,)
        self._add_feed_forward(f"{blk}.ffn", "_exps", n_experts, self.n_ff_expert, matrix)
        if self.has_shared_expert:
            self._add_feed_forward(f"{blk}.ffn", "_shexp", (), self.n_ff_shared, matrix)
            vector(f"{blk}.ffn_gate_inp_shexp.weight", self.n_embd, 0, 0.3)

    def _add_feed_forward(
        self, ffn: str, suffix: str, experts: tuple[int, ...], n_ff: int,
        matrix: Callable[..., None],
    ) -> None:  # fmt: skip
        matrix(f"{ffn}_gate{suffix}", *experts, n_ff, self.n_embd)
        matrix(f"{ffn}_up{suffix}", *experts, n_ff, self.n_embd)
        matrix(f"{ffn}_down{suffix}", *experts, self.n_embd, n_ff)


def write_random_model(path: Path, **options: Any) -> Path:
    """Write `RandomModel(**options)` to `path`."""
    return RandomModel(**options).write(path)


YARN: Mapping[str, float | int | str] = MappingProxyType({
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 256,
})  # fmt: skip

KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "llama": {"architecture": "llama"},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3"},
    "mistral": {"architecture": "llama", "keys": {"attention.sliding_window": 20}},
    "gemma2": {"architecture": "gemma2", "n_layers": 3, "keys": {
        "attention.sliding_window": 20, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0}},
    "gemma3": {"architecture": "gemma3", "n_layers": 6, "rope_base": 1e6, "keys": {
        "attention.sliding_window": 20, "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0}},
    "phi3": {"architecture": "phi3", "rope_dim": 16},
    "phi3-long": {"architecture": "phi3", "tied": False, "keys": {
        "rope.scaling.type": "longrope", "rope.scaling.original_context_length": 300,
        "rope.scaling.attn_factor": 1.2}},
    "granite": {"architecture": "granite", "keys": {
        "embedding_scale": 6.0, "residual_scale": 0.22, "logit_scale": 4.0,
        "attention.scale": 0.09}},
    "smollm3": {"architecture": "smollm3", "n_layers": 4},
    "llama-factors": {"architecture": "llama", "rope_factors": True},
    "linear": {"architecture": "llama", "keys": {
        "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
    "yarn": {"architecture": "qwen3", "keys": YARN},
    "mixtral": {"architecture": "llama", "n_experts": 4},
    "mixtral-all": {"architecture": "llama", "n_experts": 3, "n_used": 3, "keys": {
        "expert_weights_norm": False, "expert_weights_scale": 1.7}},
    "mixtral-one": {"architecture": "llama", "n_experts": 1, "n_used": 1, "n_layers": 1},
    "qwen2moe": {"architecture": "qwen2moe", "n_experts": 8, "n_used": 3, "n_ff_expert": 32},
    "qwen3moe": {"architecture": "qwen3moe", "n_experts": 7},
})  # fmt: skip
"""Options by the kind of model: every architecture, every way to stretch rope."""


def random_options(seed: int) -> RandomModel:
    """A llama or qwen2 of random shape: every option varies, sizes around the vector width."""
    rng = np.random.default_rng(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    head_dim, n_kv_heads = pick(32, 64), pick(1, 2, 3)
    architecture = pick("llama", "qwen2")
    return RandomModel(
        architecture=architecture,
        formats=pick(*((f,) for f in BLOCK_FORMATS + FLOAT_FORMATS), BLOCK_FORMATS, FLOAT_FORMATS),
        n_layers=pick(1, 2, 3),
        n_embd=pick(64, 96, 128),
        n_heads=n_kv_heads * pick(1, 2, 3),
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_ff=pick(32, 96, 160, 256),
        rope_base=pick(1e4, 1e6),
        rope_dim=pick(None, head_dim // 2),
        rope_factors=pick(False, True),
        tied=pick(False, True),
        biases=pick(None, True) if architecture == "llama" else None,
        pre_tokenizer=pick("qwen2", "smollm", "gpt-2"),
        seed=seed,
    )


def random_models(folder: Path, n_models: int, seed: int = 0) -> Iterator[tuple[RandomModel, Path]]:
    """Write `n_models` models of random options, one after the other."""
    for i in range(seed, seed + n_models):
        model = random_options(i)
        yield model, model.write(folder / f"random-{i}.gguf")


def vocabulary() -> list[str]:
    """300 tokens: the 256 bytes, what the merges make, three control tokens."""
    merged = dict.fromkeys(merge.replace(" ", "") for merge in MERGES)
    return [*(to_characters(bytes([b])) for b in range(256)), *merged, *CONTROL]


def _add_vocabulary(writer: GGUFWriter, tokens: list[str], pre_tokenizer: str) -> None:
    normal, control = 1, 3
    kinds = [control if token in CONTROL else normal for token in tokens]
    writer.add("tokenizer.ggml.model", "gpt2")
    writer.add("tokenizer.ggml.pre", pre_tokenizer)
    writer.add("tokenizer.ggml.tokens", tokens)
    writer.add("tokenizer.ggml.token_type", np.array(kinds, dtype=np.int32))
    writer.add("tokenizer.ggml.merges", list(MERGES))
    writer.add("tokenizer.ggml.bos_token_id", tokens.index("<|endoftext|>"))
    writer.add("tokenizer.ggml.eos_token_id", tokens.index("<|im_end|>"))
    writer.add("tokenizer.ggml.add_bos_token", False)
