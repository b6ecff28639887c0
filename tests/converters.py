"""Files made from files: the same model under another architecture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ignis.gguf import GGUFFile, GGUFWriter


def llama_to_qwen2(file: GGUFFile, path: Path) -> Path:
    """Write an equivalent qwen2 file.

    A llama file stores rotated pairs side by side, (2i, 2i + 1); qwen2 rotates (i, i + C/2), so
    the rows of q and k are put back in that order. Biases, which qwen2 needs, are zero.
    """
    source, target = "llama.", "qwen2."
    writer = GGUFWriter(path, "qwen2")
    for key, value in file.metadata.items():
        if key not in ("general.architecture",) and not key.startswith("GGUF."):
            kept = [str(s) for s in value] if type(value).__name__ == "StringArray" else value
            writer.add(key.replace(source, target), kept)
    n_heads = file.require("llama.attention.head_count", int)
    n_kv_heads = file.require("llama.attention.head_count_kv", int)
    for name, info in file.tensors.items():
        raw = file.data(name)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            rows = raw.reshape(info.shape[0], -1)
            raw = _separate_pairs(rows, n_heads if "attn_q" in name else n_kv_heads)
        writer.add_raw_tensor(name, info.shape, info.format, raw)
        if name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight")):
            bias = np.zeros(info.shape[0], np.float32)
            writer.add_tensor(name.replace("weight", "bias"), bias)
    writer.write()
    return path


def _separate_pairs(rows: NDArray[np.uint8], n_heads: int) -> NDArray[np.uint8]:
    """Rows [heads * C, bytes]: (0, 1), (2, 3), ... of each head -> 0, 2, 4, ..., 1, 3, 5, ..."""
    heads = rows.reshape(n_heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)
