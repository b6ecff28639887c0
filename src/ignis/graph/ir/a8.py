"""A8: activations in blocks of 32, int8 with an f32 scale and an integer sum (NUMERICS 1)."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from ignis.graph.ir.types import A8_BLOCK

Planes: TypeAlias = (
    "tuple[np.ndarray[Any, np.dtype[np.int8]], np.ndarray[Any, np.dtype[np.float32]],"
    " np.ndarray[Any, np.dtype[np.int32]]]"
)

_TINY = np.float32(2.0**-100)


def quantize_a8(x: np.ndarray[Any, Any]) -> Planes:
    """Quantize rows [..., D], every operation in f32 as the kernels do it.

    Returns: q int8 [..., D] in [-127, 127], d f32 [..., D/32], s int32 [..., D/32]. A block with
    a NaN or an infinity has q = 0 and d = NaN; one below 2^-100 has q = d = 0.
    """
    by_block = (*x.shape[:-1], x.shape[-1] // A8_BLOCK, A8_BLOCK)  # there may be no rows at all
    blocks = np.asarray(x, dtype=np.float32).reshape(by_block)
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(axis=-1)  # max propagates NaN
        finite = np.isfinite(amax)
        usable = finite & (amax >= _TINY)
        inverse = np.float32(127) / np.where(usable, amax, np.float32(1))
        scaled = np.where(usable[..., None], blocks, np.float32(0)) * inverse[..., None]
        d = np.where(usable, amax / np.float32(127), np.where(finite, 0, np.nan))
    q = np.rint(scaled).astype(np.int8)
    return q.reshape(x.shape), d.astype(np.float32), q.sum(axis=-1, dtype=np.int32)


def dequantize_a8(q: np.ndarray[Any, Any], d: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The float64 values that the blocks stand for: q * d, exact."""
    by_block = (*q.shape[:-1], q.shape[-1] // A8_BLOCK, A8_BLOCK)
    blocks = q.reshape(by_block).astype(np.float64)
    return (blocks * d.astype(np.float64)[..., None]).reshape(q.shape)
