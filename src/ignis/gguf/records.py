"""What the weight format classes share: their types, and the bits that several of them unpack."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Blocks: TypeAlias = NDArray[np.void]        # [n_blocks], one structured record a block
Floats: TypeAlias = NDArray[np.float32]     # [n_blocks, block_size]
Bytes: TypeAlias = NDArray[np.uint8]


class Format(Protocol):
    """What a format class declares; the class itself is the declaration, nobody makes one."""

    ggml_type: int
    block_size: int
    nbytes: int
    dtype: np.dtype[Any]

    @staticmethod
    def decode(blocks: Blocks) -> Floats: ...


def column(numbers: NDArray[Any]) -> Floats:
    """One number a block -> float32 [n_blocks, 1]."""
    return numbers.astype(np.float32)[:, None]


def nibbles(qs: Bytes) -> Bytes:
    """[n, 16] bytes -> [n, 32] values 0..15: all low nibbles, then all high ones."""
    out = np.empty((len(qs), 32), dtype=np.uint8)
    np.bitwise_and(qs, 15, out=out[:, :16])
    np.right_shift(qs, 4, out=out[:, 16:])
    return out


def pack_nibbles(q: NDArray[np.int8]) -> Bytes:
    """The inverse of `nibbles`."""
    unsigned = q.view(np.uint8)
    return unsigned[:, :16] | (unsigned[:, 16:] << np.uint8(4))


def reciprocal(d: Floats) -> Floats:
    """1 / d, and 0 for a block of zeros."""
    return np.where(d == 0, np.float32(0), np.float32(1) / d)


def bounded(x: Floats, low: int, high: int) -> NDArray[np.int8]:
    """Truncate to integers in low..high. NaN gives 0 on every processor; a bare cast does not."""
    bounded: NDArray[np.int8] = np.nan_to_num(np.trunc(x).clip(low, high), nan=0.0).astype(np.int8)
    return bounded


def fields(numbers: NDArray[Any], n_bits: int) -> Bytes:
    """[n, m] bytes -> [n, m * 8 / n_bits]: all lowest fields of `n_bits`, then the next ones.

        fields(x, 2)[:, :m] == x & 3,   fields(x, 2)[:, m : 2 * m] == (x >> 2) & 3,   ...
    """
    shifts = np.arange(0, 8, n_bits, dtype=np.uint8)[:, None]
    planes = (numbers[:, None, :] >> shifts) & np.uint8((1 << n_bits) - 1)
    return planes.reshape(len(numbers), -1)


def join_fields(numbers: Bytes, n_bits: int) -> Bytes:
    """The inverse of `fields`: [n, m * 8 / n_bits] numbers below 2^n_bits -> [n, m] bytes."""
    shifts = np.arange(0, 8, n_bits, dtype=np.uint8)[:, None]
    planes = numbers.reshape(len(numbers), len(shifts), -1) << shifts
    joined: Bytes = np.bitwise_or.reduce(planes, axis=1)
    return joined
