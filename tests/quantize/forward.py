"""The forward pass of transformers' model classes in NumPy float64, by their tensor names.

Written from their papers and documentation, apart from everything in `src`: what a converted file
computes is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


class Forward:
    """A model: `config` in the older form, tensors as in the checkpoint."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        self.config = config
        self.name = config["architectures"][0].removesuffix("ForCausalLM")
        self.n_experts = config.get("num_experts", config.get("num_local_experts"))
        self.tensors = {key: value.astype(np.float64) for key, value in tensors.items()}
        self.is_gemma = self.name.startswith("Gemma")

    def __call__(self, ids: list[int]) -> F64:
        """Logits [T, V]."""
        c = self.config
        x = self.tensors["model.embed_tokens.weight"][ids]
        x = x * (np.sqrt(c["hidden_size"]) if self.is_gemma else c.get("embedding_multiplier", 1))
        residual = c.get("residual_multiplier", 1)
        for i in range(c["num_hidden_layers"]):
            blk = f"model.layers.{i}"
            branch = self.attention(i, self.norm(f"{blk}.input_layernorm", x))
            if self.is_gemma:
                x = x + self.norm(f"{blk}.post_attention_layernorm", branch)
                branch = self.mlp(i, self.norm(f"{blk}.pre_feedforward_layernorm", x))
                x = x + self.norm(f"{blk}.post_feedforward_layernorm", branch)
                continue
            x = x + residual * branch
            x = x + residual * self.mlp(i, self.norm(f"{blk}.post_attention_layernorm", x))
        head = "model.embed_tokens" if c["tie_word_embeddings"] else "lm_head"
        logits = self.norm("model.norm", x) @ self.tensors[f"{head}.weight"].T
        return capped(logits / c.get("logits_scaling", 1), c.get("final_logit_softcapping"))

    def norm(self, key: str, x: F64) -> F64:
        gain = self.tensors[f"{key}.weight"] + (1 if self.is_gemma else 0)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * gain

    def linear(self, key: str, x: F64) -> F64:
        return x @ self.tensors[f"{key}.weight"].T + self.tensors.get(f"{key}.bias", 0)

    def experts(self, i: int, x: F64) -> F64:
        """Each token through the experts that its router likes best, and the shared one."""
        mixtral = self.name == "Mixtral"
        blk = f"model.layers.{i}." + ("block_sparse_moe" if mixtral else "mlp")
        parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        scores = self.linear(f"{blk}.gate", x)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out = np.zeros_like(x)
        for t, row in enumerate(p):
            chosen = np.argsort(-row, kind="stable")[: self.config["num_experts_per_tok"]]
            whole = row[chosen].sum() if mixtral or self.config.get("norm_topk_prob") else 1
            for e in chosen:
                out[t] += row[e] / whole * self.gated(f"{blk}.experts.{e}", x[t], parts)
        if self.name == "Qwen2Moe":
            gate = 1 / (1 + np.exp(-self.linear(f"{blk}.shared_expert_gate", x)))
            out += gate * self.gated(f"{blk}.shared_expert", x, parts)
        return out

    def gated(self, key: str, x: F64, parts: tuple[str, str, str]) -> F64:
        gate, up, down = parts
        hidden = silu(self.linear(f"{key}.{gate}", x)) * self.linear(f"{key}.{up}", x)
        return self.linear(f"{key}.{down}", hidden)

    def mlp(self, i: int, x: F64) -> F64:
        if self.n_experts:
            return self.experts(i, x)
        blk = f"model.layers.{i}.mlp"
        if self.name == "Phi3":
            gate, up = np.split(self.linear(f"{blk}.gate_up_proj", x), 2, axis=-1)
        else:
            gate, up = (self.linear(f"{blk}.{part}_proj", x) for part in ("gate", "up"))
        return self.linear(f"{blk}.down_proj", (gelu if self.is_gemma else silu)(gate) * up)

    def attention(self, i: int, x: F64) -> F64:
        c, blk = self.config, f"model.layers.{i}.self_attn"
        n_heads, n_kv, head = (c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"])
        if self.name == "Phi3":
            qkv = self.linear(f"{blk}.qkv_proj", x)
            q, k, v = np.split(qkv, [n_heads * head, (n_heads + n_kv) * head], axis=-1)
        else:
            q, k, v = (self.linear(f"{blk}.{part}_proj", x) for part in "qkv")
        q, k, v = (t.reshape(len(x), -1, head).swapaxes(0, 1) for t in (q, k, v))
        if f"{blk}.q_norm.weight" in self.tensors:
            q, k = self.norm(f"{blk}.q_norm", q), self.norm(f"{blk}.k_norm", k)
        is_local = self.is_local(i)
        if not (self.name == "SmolLM3" and i % 4 == 3):
            q, k = self.rotated(q, is_local), self.rotated(k, is_local)
        k, v = (np.repeat(t, n_heads // n_kv, axis=0) for t in (k, v))
        scale = c.get("attention_multiplier", c.get("query_pre_attn_scalar", head) ** -0.5)
        scores = capped(q @ k.swapaxes(1, 2) * scale, c.get("attn_logit_softcapping"))
        distance = np.subtract.outer(np.arange(len(x)), np.arange(len(x)))
        seen = (distance >= 0) & (distance < (c["sliding_window"] if is_local else len(x)))
        scores = np.where(seen, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = p / p.sum(-1, keepdims=True) @ v
        return self.linear(f"{blk}.o_proj", mixed.swapaxes(0, 1).reshape(len(x), -1))

    def is_local(self, i: int) -> bool:
        if (kinds := self.config.get("layer_types")) is not None:
            return bool(kinds[i] == "sliding_attention")
        step = {"Gemma2": 2, "Gemma3": 6}.get(self.name)
        return bool(self.config.get("sliding_window")) and (step is None or (i + 1) % step != 0)

    def rotated(self, x: F64, is_local: bool) -> F64:
        """Halves of the rotated part of each head turned against each other."""
        c = self.config
        n = int(c["head_dim"] * c.get("partial_rotary_factor", 1))
        is_gemma3 = self.name == "Gemma3"
        base = c.get("rope_local_base_freq", 1e4) if is_gemma3 and is_local else c["rope_theta"]
        frequencies = base ** (-np.arange(0, n, 2) / n)
        if not (is_gemma3 and is_local):
            frequencies = stretched(frequencies, c.get("rope_scaling", {}))
        angles = np.outer(np.arange(x.shape[1]), np.concatenate([frequencies, frequencies]))
        turned, rest = x[..., :n], x[..., n:]
        crossed = np.concatenate([-turned[..., n // 2 :], turned[..., : n // 2]], axis=-1)
        return np.concatenate([turned * np.cos(angles) + crossed * np.sin(angles), rest], axis=-1)


def stretched(frequencies: F64, scaling: Mapping[str, Any]) -> F64:
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind is None:
        return frequencies
    slow = frequencies / scaling["factor"]
    if kind == "linear":
        return slow
    assert kind == "llama3"
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (turns - low) / (high - low)
    mixed = (1 - smooth) * slow + smooth * frequencies
    return np.where(turns < low, slow, np.where(turns > high, frequencies, mixed))


def capped(x: F64, cap: float | None) -> F64:
    return x if cap is None else np.tanh(x / cap) * cap


def silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


def gelu(x: F64) -> F64:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
