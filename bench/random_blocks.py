"""Random weights in any format that can be decoded, of a chosen spread.

Encoding a billion random floats takes minutes; instead the blocks' bits themselves are random, and
the scales are set so that decoded values have the wanted mean and standard deviation.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.errors import UsageError
from ignis.gguf import BLOCKS, BlockFormat

_SAMPLE_BLOCKS = 4096


def random_weights(
    name: str, n_rows: int, n_columns: int, format: str
) -> NDArray[np.uint8]:
    """Bytes of a matrix [N, K] with standard deviation 1/sqrt(K): products keep their scale.

    The same name and sizes give the same bytes. Raises UsageError for a format that can't be made.
    """
    block = BLOCKS[format]
    deviation = n_columns**-0.5
    rng = np.random.default_rng(zlib.crc32(f"{name} {format}".encode()))
    if block.block_size == 1 and block.encodable:
        out = np.empty((n_rows, block.row_nbytes(n_columns)), np.uint8)
        step = max(1, (1 << 22) // n_columns)
        for start in range(0, n_rows, step):
            floats = rng.standard_normal((min(step, n_rows - start), n_columns), np.float32)
            out[start : start + step] = block.encode(floats * np.float32(deviation))
        return out.reshape(-1)
    n_blocks = n_rows * (block.row_nbytes(n_columns) // block.nbytes)
    blocks = _random_bits(block, n_blocks, rng)
    scales = _scales(block, deviation)
    for field, value in scales.items():
        set_scale(blocks, field, value)
    if scales.keys() == {"d"}:  # integers are seldom centred: half the blocks count backwards
        signs = rng.integers(-1, 1, n_blocks, np.int8) + 0.5
        set_scale(blocks, "d", np.copysign(scales["d"], signs))
    return blocks.view(np.uint8)


def _scales(block: BlockFormat, deviation: float) -> dict[str, float]:
    """Values of the scale fields that give decoded values the deviation and, if they can, mean 0.

    A value is d * u, d * u - dmin * v or d * u + m, with u and v random: linear in the scales.
    MXFP4's scale is a power of two, 2^e.
    """
    names = scale_fields(block)
    if not block.supported or not names:
        raise UsageError("no random weights in this format", got=block.name,
                         wanted="a format with a scale d or e that Ignis decodes")  # fmt: skip
    bits = _random_bits(block, _SAMPLE_BLOCKS, np.random.default_rng(0))

    def decoded(**scales: float) -> NDArray[np.float64]:
        for field in names:
            set_scale(bits, field, scales.get(field, 0))
        return block.decode(bits.view(np.uint8)).astype(np.float64)

    if "e" in names:
        bias = 127
        return {"e": bias + round(math.log2(deviation / decoded(e=bias).std()))}
    scales = {"d": 1.0}
    centre = decoded(d=1.0).mean()
    for field in {"m", "dmin"} & names:
        scales[field] = -centre / decoded(**{field: 1.0}).mean()
    factor = deviation / decoded(**scales).std()
    return {field: float(value * factor) for field, value in scales.items()}


def scale_fields(block: BlockFormat) -> set[str]:
    """The fields of a block that scale it; IQ1_M has a d that is no field of its own."""
    names = set(block.dtype.names or ()) & {"d", "dmin", "m", "e"}
    return {"d"} if block.name == "iq1_m" else names


def set_scale(
    blocks: NDArray[np.void], field: str, value: float | NDArray[np.floating[Any]]
) -> None:
    """Set one of `scale_fields` in all blocks."""
    if field in (blocks.dtype.names or ()):
        blocks[field] = value
        return
    bits = np.asarray(value, np.float16).view(np.uint16)[..., None]
    nibbles = bits >> np.arange(0, 16, 4, dtype=np.uint16) << np.uint16(12)
    blocks["scales"] = (blocks["scales"] & 0xFFF) | nibbles


def scale_of(blocks: NDArray[np.void], field: str) -> NDArray[np.floating[Any]]:
    """A copy of one of `scale_fields` of all blocks."""
    if field in (blocks.dtype.names or ()):
        return np.array(blocks[field])
    nibbles = (blocks["scales"] >> 12) << np.arange(0, 16, 4, dtype=np.uint16)
    return nibbles.sum(axis=-1, dtype=np.uint16).view(np.float16)


def _random_bits(
    block: BlockFormat, n_blocks: int, rng: np.random.Generator
) -> NDArray[np.void]:
    blocks = rng.integers(0, 256, n_blocks * block.nbytes, np.uint8).view(block.dtype)
    for name in block.dtype.names or ():
        if block.dtype[name].base == np.int8:  # encoders leave -128 out
            np.maximum(blocks[name], -127, out=blocks[name])
    return blocks
