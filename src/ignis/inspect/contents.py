"""What a model file holds, as JSON values: sizes, formats, tokenizer, the numbers of its kind.

Works on files that cannot be run, too: what metadata lacks is left out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sized
from types import MappingProxyType
from typing import Any

from ignis.gguf import GGUFFile
from ignis.quantize.mix import MIXES

_OTHER_FILE_TYPES = MappingProxyType({
    19: "iq2_xxs", 20: "iq2_xs", 21: "q2_k_s", 22: "iq3_xs", 23: "iq3_xxs", 24: "iq1_s",
    26: "iq3_s", 27: "iq3_m", 28: "iq2_s", 29: "iq2_m", 31: "iq1_m",
})  # fmt: skip
"""`llama_ftype` of types that `ignis quantize` does not make."""

_GROUPS: tuple[tuple[str, str], ...] = (
    ("embedding", r"token_embd\."), ("output", r"^output\."), ("norms", r"norm"),
    ("biases", r"\.bias$"), ("router", r"ffn_gate_inp"), ("experts", r"_exps\."),
    ("shared expert", r"_shexp\."), ("attention qkv", r"attn_(qkv|q|k|v)\."),
    ("attention output", r"attn_output\."), ("feed-forward in", r"ffn_(gate|up)\."),
    ("feed-forward out", r"ffn_down\."),
)  # fmt: skip
"""Kinds of tensors by what their names hold; the first that fits."""

_SHAPE = MappingProxyType({
    "layers": "block_count", "width": "embedding_length", "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv", "hidden_width": "feed_forward_length",
    "context": "context_length", "window": "attention.sliding_window",
    "experts": "expert_count", "experts_used": "expert_used_count",
})  # fmt: skip


def contents(file: GGUFFile) -> dict[str, Any]:
    """Everything that can be said of a file without running it. Sizes are bytes."""
    by_type: dict[str, Counter[str]] = {}
    groups: dict[str, Counter[str]] = {}
    for name, tensor in file.tensors.items():
        row = by_type.setdefault(tensor.format.name, Counter())
        row.update(tensors=1, parameters=math.prod(tensor.shape), bytes=tensor.nbytes)
        groups.setdefault(_group(name), Counter())[tensor.format.name] += 1
    total: Counter[str] = Counter()
    for row in by_type.values():
        total.update(row)
    shares = {name: row["bytes"] / total["bytes"] if total["bytes"] else 0.0
              for name, row in by_type.items()}
    return {
        "path": str(file.path),
        "gguf_version": file.version,
        "bytes": file.nbytes,
        "files": len(file.mappings),
        "architecture": file.get("general.architecture", "unknown"),
        "name": file.get("general.name", ""),
        "file_type": file_type(file),
        "shape": _numbers(file, _SHAPE),
        "rope": _rope(file),
        "tensors": {
            "total": dict(total),
            "bits_per_weight": round(8 * total["bytes"] / total["parameters"], 3)
            if total["parameters"] else None,
            "by_type": {name: {**row, "share": round(shares[name], 4)}
                        for name, row in by_type.items()},
            "groups": {name: dict(groups[name]) for name in _in_order(groups)},
        },
        "tokenizer": _tokenizer(file),
        "metadata": {key: plain(value) for key, value in file.metadata.items()},
    }  # fmt: skip


def file_type(file: GGUFFile) -> str | None:
    """What the file says it is, `q4_k_m` for instance; None where it says nothing."""
    number = file.metadata.get("general.file_type")
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    known = {mix.file_type: name for name, mix in MIXES.items()} | dict(_OTHER_FILE_TYPES)
    return known.get(number, f"number {number}")


def plain(value: Any) -> Any:
    """A metadata value as JSON; a long array as its length."""
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return {"array": len(value)}


def _group(name: str) -> str:
    return next((group for group, part in _GROUPS if re.search(part, name)), "other")


def _in_order(groups: Mapping[str, object]) -> list[str]:
    return [name for name in (*(group for group, _ in _GROUPS), "other") if name in groups]


def _numbers(file: GGUFFile, keys: Mapping[str, str]) -> dict[str, Any]:
    """Hyperparameters that the file has, by our names."""
    architecture = file.metadata.get("general.architecture")
    found = {name: file.metadata.get(f"{architecture}.{key}") for name, key in keys.items()}
    return {name: plain(value) for name, value in found.items() if value is not None}


def _rope(file: GGUFFile) -> dict[str, Any]:
    """All that the file says of rope, without the architecture's name: base, scaling, factors."""
    prefix = f"{file.metadata.get('general.architecture')}.rope."
    found = {key.removeprefix(prefix): plain(value) for key, value in file.metadata.items()
             if key.startswith(prefix)}
    if any(name.startswith("rope_f") for name in file.tensors):
        found["factors"] = "in the file"
    return found


def _tokenizer(file: GGUFFile) -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    tokens = file.metadata.get(f"{prefix}tokens")
    special = {key.removeprefix(prefix).removesuffix("_token_id"): value
               for key, value in file.metadata.items()
               if key.startswith(prefix) and key.endswith("_token_id")}
    return {"model": plain(file.metadata.get(f"{prefix}model", "none")),
            "pre": plain(file.metadata.get(f"{prefix}pre", "")),
            "tokens": len(tokens) if isinstance(tokens, Sized) else 0,
            "special_ids": {key: plain(value) for key, value in special.items()},
            "chat_template": "tokenizer.chat_template" in file.metadata}
