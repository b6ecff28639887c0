"""Skeletons of models, and what llama.cpp makes of their tensors in each file type.

`python -m tests.quantize.mixes` (needs llama-cpp-python) writes `data/mixes.json` anew: by model,
by file type, by the part of a tensor's name behind the layer, the formats of the layers in
order, as "q6_k*2 q4_k*3". The models are no more than names, shapes and the keys that matter.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from ignis.gguf import GGUFWriter, open_gguf
from ignis.quantize.mix import MIXES

GOLDEN = Path(__file__).parent / "data" / "mixes.json"
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    architecture: str = "llama"
    n_layers: int
    n_heads: int = 4
    n_kv_heads: int = 4
    n_experts: int = 0
    width: int = 256
    tied: bool = False
    fused: bool = False

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        values: dict[str, float] = {
            "block_count": self.n_layers, "context_length": 64, "embedding_length": self.width,
            "feed_forward_length": self.width, "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "rope.dimension_count": self.width // self.n_heads,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }  # fmt: skip
        if self.n_experts:
            values |= {"expert_count": self.n_experts, "expert_used_count": 2}
        for key, value in values.items():
            writer.add(f"{self.architecture}.{key}", value)
        for name, shape in self.tensors():
            writer.add_tensor(name, np.ones(shape, np.float32))
        writer.write()
        return path

    def tensors(self) -> Iterable[tuple[str, tuple[int, ...]]]:
        row = (2, self.width)
        yield "token_embd.weight", row
        if not self.tied:
            yield "output.weight", row
        yield "output_norm.weight", (self.width,)
        experts = "_exps" if self.n_experts else ""
        for i in range(self.n_layers):
            yield f"blk.{i}.attn_norm.weight", (self.width,)
            attention = ("attn_qkv", "attn_output") if self.fused else _ATTENTION
            yield from ((f"blk.{i}.{role}.weight", row) for role in attention)
            shape = (self.n_experts, *row) if experts else row
            yield from ((f"blk.{i}.{role}{experts}.weight", shape) for role in _FEED_FORWARD)
            if experts:
                yield f"blk.{i}.ffn_gate_inp.weight", (self.n_experts, self.width)


SKELETONS = {
    "grouped": Skeleton(n_layers=16, n_heads=8, n_kv_heads=2, tied=True),
    "pairs": Skeleton(n_layers=17, n_heads=4, n_kv_heads=2),
    "fused": Skeleton(architecture="phi3", n_layers=9, fused=True),
    "80 layers": Skeleton(n_layers=80, n_heads=8, n_kv_heads=1),
    "80 layers, not grouped": Skeleton(n_layers=80),
    "8 experts": Skeleton(n_layers=11, n_heads=8, n_kv_heads=2, n_experts=8),
    "4 experts": Skeleton(architecture="qwen2moe", n_layers=10, n_experts=4),
    "short rows": Skeleton(n_layers=5, n_kv_heads=1, width=96, tied=True),
    "odd rows": Skeleton(n_layers=3, n_kv_heads=2, width=80),
}


def by_role(formats: Iterable[tuple[str, str]]) -> dict[str, str]:
    """(tensor, format) pairs -> the formats of each role, layer by layer."""
    rows: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name, format_name in formats:
        match = re.match(r"blk\.(\d+)\.(.*)", name)
        layer, role = (int(match[1]), match[2]) if match else (0, name)
        rows[role].append((layer, format_name))
    return {role: " ".join(f"{name}*{len(list(group))}" for name, group in
                           groupby(name for _, name in sorted(row)))
            for role, row in sorted(rows.items())}  # fmt: skip


def main() -> None:
    import llama_cpp

    choices: dict[str, dict[str, dict[str, str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "out.gguf")
        for model, skeleton in SKELETONS.items():
            source = skeleton.write(Path(folder, "in.gguf"))
            choices[model] = {}
            for name, mix in MIXES.items():
                options = llama_cpp.llama_model_quantize_default_params()
                options.ftype = mix.file_type
                code = llama_cpp.llama_model_quantize(
                    str(source).encode(), str(target).encode(), options)
                assert code == 0, (model, name)
                with open_gguf(target) as file:
                    formats = ((t.name, t.format.name) for t in file.tensors.values())
                    choices[model][name] = by_role(formats)
    GOLDEN.write_text(json.dumps(choices, indent=1) + "\n")


if __name__ == "__main__":
    main()
