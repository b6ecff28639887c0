"""Names of tensors in checkpoints and in GGUF, and what happens to their values on the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ignis.gguf import BLOCKS
from ignis.quantize.hf.architectures import HFArchitecture
from ignis.quantize.hf.hyperparameters import Hyperparameters
from ignis.quantize.source import Rows, SourceTensor

_OUTER = {"embed_tokens": "token_embd", "norm": "output_norm"}
_INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_BRANCH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERTS = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_ONE_EXPERT = {
    "w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps",
    "gate_proj": "ffn_gate_exps", "down_proj": "ffn_down_exps", "up_proj": "ffn_up_exps",
}  # fmt: skip
_EXPERT = re.compile(r"(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)")
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# Of models that see, and buffers that rope computes.
_LEFT_OUT = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|.*rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it lies in a checkpoint; `read(start, stop)` gives rows in `dtype`'s format."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Rows]


def gguf_name(name: str, architecture: HFArchitecture) -> tuple[str, int | None] | None:
    """The name in GGUF, and the expert whose part it is; None for what has no place there."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in ("lm_head", "language_model.lm_head"):
        return f"output.{kind}", None
    inner = next((stem.removeprefix(p) for p in _PREFIXES if stem.startswith(p)), None)
    if inner is None:
        return None
    if inner in _OUTER:
        return f"{_OUTER[inner]}.{kind}", None
    match = _LAYER.fullmatch(inner)
    if match is None:
        return None
    part, expert = _part(match[2], architecture)
    return None if part is None else (f"blk.{int(match[1])}.{part}.{kind}", expert)


def _part(inner: str, architecture: HFArchitecture) -> tuple[str | None, int | None]:
    """GGUF's name for a part of a layer, and the expert."""
    if architecture.has_experts and (match := _EXPERT.fullmatch(inner)):
        return _ONE_EXPERT.get(match[2]), int(match[1])
    names = _INNER | (_BRANCH_NORMS if architecture.branch_norms else {})
    if architecture.has_experts:
        names |= _EXPERTS
    return names.get(inner), None


def is_left_out(name: str) -> bool:
    """Whether a tensor belongs to no text model, or is computed anyway."""
    return _LEFT_OUT.match(name) is not None


def place_in_file(name: str) -> tuple[int, int, str]:
    """Sorts GGUF names: the embedding, the layers, the output."""
    match = re.match(r"blk\.(\d+)\.", name)
    if match:
        return 1, int(match[1]), name
    return (0 if name.startswith("token_embd") else 2), 0, name


def converted(stored: Stored, name: str, architecture: HFArchitecture, numbers: Hyperparameters
              ) -> SourceTensor:
    """The tensor as GGUF has it: vectors in f32, norms with their offset, heads reordered."""
    heads = {"attn_q": numbers.n_heads, "attn_k": numbers.n_kv_heads}
    part = name.split(".")[-2]
    if part == "ffn_gate_inp_shexp" and stored.shape[:1] == (1,):   # one row: a vector
        stored = replace(stored, shape=stored.shape[1:])
    n_heads = heads.get(part) if architecture.pairs_apart else None
    if len(stored.shape) == 1:
        return _vector(stored, name, architecture.norm_offset if "norm" in part else 0.0, n_heads)
    if n_heads is None or stored.shape[0] % n_heads:    # a wrong shape is found by lowering
        return SourceTensor(name, stored.shape, BLOCKS[stored.dtype], stored.read)
    head_dim = stored.shape[0] // n_heads

    def read(start: int, stop: int) -> Rows:
        first = start // head_dim * head_dim
        rows = stored.read(first, -(-stop // head_dim) * head_dim)
        return neighbours(rows, head_dim)[start - first : stop - first]

    return SourceTensor(name, stored.shape, BLOCKS[stored.dtype], read)


def neighbours(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of whole heads, pairs (i, i + C/2) -> (2i, 2i + 1), as interleaved rope wants them."""
    pairs = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2)
    return pairs.reshape(rows.shape)


def _vector(stored: Stored, name: str, offset: float, n_heads: int | None) -> SourceTensor:
    def read(start: int, stop: int) -> Rows:
        values = BLOCKS[stored.dtype].decode(stored.read(0, 1)).reshape(-1)
        if offset:
            values = values + np.float32(offset)
        if n_heads is not None and len(values) % n_heads == 0:
            values = neighbours(values, len(values) // n_heads)
        return values.view(np.uint8).reshape(1, -1)

    return SourceTensor(name, stored.shape, BLOCKS["f32"], read)
