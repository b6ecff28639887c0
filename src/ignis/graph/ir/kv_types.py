"""What rounding to the KV cache's types means, every operation in f32 as the kernels do it."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from ignis.errors import GraphError
from ignis.graph.ir.types import KV_TYPES

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

DEFAULT_KV_TYPE = "f16"
KV_BLOCK = 32
"""Values of q8_0 that share a scale."""


def check_kv_type(kv_type: str, head_dim: int, where: object = None) -> None:
    """Raise GraphError for an unknown type, and for heads that it cannot hold."""
    if kv_type not in KV_TYPES:
        raise GraphError("no such type of KV cache", where=where, got=kv_type,
                         wanted=" or ".join(KV_TYPES))  # fmt: skip
    if kv_type == "q8_0" and head_dim % KV_BLOCK:
        raise GraphError("heads of this width can't be kept as q8_0", where=where, got=head_dim,
                         wanted=f"a multiple of {KV_BLOCK}", hint="take f16")  # fmt: skip


def through_cache(rows: Array, kv_type: str) -> Array:
    """Rows [t, K*C] of keys or values as they are read back."""
    # Through f32, where the engine's rows come from: rounding f64 at once could differ.
    exact = rows.astype(np.float32)
    with np.errstate(all="ignore"):
        if kv_type == "q8_0":
            return _through_q8_0(exact)
        dtype = np.float16 if kv_type == "f16" else np.float32
        return exact.astype(dtype).astype(np.float64)


def _through_q8_0(rows: np.ndarray[Any, np.dtype[np.float32]]) -> Array:
    """d = f16(max|x| / 127); q = roundeven(x * (1 / d)), at most 127 in size; d * q, exact."""
    blocks = rows.reshape(len(rows), -1, KV_BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)  # max propagates NaN
    d = (largest / np.float32(127)).astype(np.float16).astype(np.float32)
    usable = (d > 0) & (d < np.inf)
    inverse = np.float32(1) / np.where(usable, d, np.float32(1))
    q = np.clip(np.rint(np.where(usable, blocks, np.float32(0)) * inverse), -127, 127)
    read: Array = (d.astype(np.float64) * q).reshape(rows.shape)
    return read
