"""Plain floats and ggml's first quantized formats: blocks of 32 with one scale.

Q5_0 and Q5_1 are Q4_0 and Q4_1 with a fifth bit, which lies apart.
"""

from __future__ import annotations

import numpy as np

from ignis.gguf.records import (
    Blocks,
    Bytes,
    Floats,
    bounded,
    column,
    nibbles,
    pack_nibbles,
    reciprocal,
)  # fmt: skip


class F32:
    """IEEE single precision."""

    ggml_type = 0
    block_size = 1
    nbytes = 4
    dtype = np.dtype([("x", "<f4")])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        return column(blocks["x"])

    @staticmethod
    def encode(values: Floats) -> Blocks:
        return values.reshape(-1).view(F32.dtype)


class F16:
    """IEEE half precision."""

    ggml_type = 1
    block_size = 1
    nbytes = 2
    dtype = np.dtype([("x", "<f2")])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        return column(blocks["x"])

    @staticmethod
    def encode(values: Floats) -> Blocks:
        return values.reshape(-1).astype("<f2").view(F16.dtype)


class BF16:
    """The upper half of a single: 8 bits of exponent, 7 of fraction."""

    ggml_type = 30
    block_size = 1
    nbytes = 2
    dtype = np.dtype([("x", "<u2")])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        return (blocks["x"].astype(np.uint32) << 16).view(np.float32)[:, None]

    @staticmethod
    def encode(values: Floats) -> Blocks:
        bits = values.reshape(-1).view(np.uint32)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        half = bits >> 16
        # Nearest even: add half a unit, one less where the kept part is even. The sum cannot
        # wrap: only NaNs reach that far, and they are cut instead and made quiet.
        nearest = (bits + 0x7FFF + (half & 1)) >> 16
        return np.where(is_nan, half | 0x40, nearest).astype("<u2").view(BF16.dtype)


class Q8_0:  # noqa: N801 (ggml's name)
    """32 signed bytes and a scale: x = d * q.

        | d f16 | qs i8 x 32 |      34 bytes
    """

    ggml_type = 8
    block_size = 32
    nbytes = 34
    dtype = np.dtype([("d", "<f2"), ("qs", "i1", 32)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        return blocks["qs"] * column(blocks["d"])

    @staticmethod
    def encode(values: Floats) -> Blocks:
        d = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
        scaled = values * reciprocal(d)
        magnitude = np.abs(scaled)
        whole = np.floor(magnitude)
        rounded = whole + (magnitude - whole >= 0.5)    # halves away from zero
        blocks = np.empty(len(values), dtype=Q8_0.dtype)
        blocks["d"] = d[:, 0]
        blocks["qs"] = bounded(np.copysign(rounded, scaled), -127, 127)
        return blocks


class Q4_0:  # noqa: N801
    """32 nibbles around 8 and a scale: x = d * (q - 8).

        | d f16 | qs u8 x 16 |      18 bytes; byte i holds value i (low nibble) and i + 16 (high)
    """

    ggml_type = 2
    block_size = 32
    nbytes = 18
    dtype = np.dtype([("d", "<f2"), ("qs", "u1", 16)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        return column(blocks["d"]) * (nibbles(blocks["qs"]).view(np.int8) - np.int8(8))

    @staticmethod
    def encode(values: Floats) -> Blocks:
        # The value of largest magnitude becomes exactly -8, the one end that has no twin.
        extreme = np.abs(values).argmax(axis=1, keepdims=True)
        d = np.take_along_axis(values, extreme, axis=1) / np.float32(-8)
        q = bounded(values * reciprocal(d) + np.float32(8.5), 0, 15)
        blocks = np.empty(len(values), dtype=Q4_0.dtype)
        blocks["d"] = d[:, 0]
        blocks["qs"] = pack_nibbles(q)
        return blocks


class Q4_1:  # noqa: N801
    """32 nibbles, a scale and a minimum: x = d * q + m.

        | d f16 | m f16 | qs u8 x 16 |      20 bytes; nibbles as in Q4_0
    """

    ggml_type = 3
    block_size = 32
    nbytes = 20
    dtype = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        return column(blocks["d"]) * nibbles(blocks["qs"]) + column(blocks["m"])

    @staticmethod
    def encode(values: Floats) -> Blocks:
        low = values.min(axis=1, keepdims=True)
        d = (values.max(axis=1, keepdims=True) - low) / np.float32(15)
        q = bounded((values - low) * reciprocal(d) + np.float32(0.5), 0, 15)
        blocks = np.empty(len(values), dtype=Q4_1.dtype)
        blocks["d"] = d[:, 0]
        blocks["m"] = low[:, 0]
        blocks["qs"] = pack_nibbles(q)
        return blocks


class Q5_0:  # noqa: N801
    """32 numbers of five bits around 16 and a scale: x = d * (q - 16).

        | d f16 | qh u32 | qs u8 x 16 |      22 bytes; bit i of qh is the high bit of value i
    """

    ggml_type = 6
    block_size = 32
    nbytes = 22
    dtype = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        return column(blocks["d"]) * (_five_bits(blocks).view(np.int8) - np.int8(16))

    @staticmethod
    def encode(values: Floats) -> Blocks:
        extreme = np.abs(values).argmax(axis=1, keepdims=True)
        d = np.take_along_axis(values, extreme, axis=1) / np.float32(-16)
        q = bounded(values * reciprocal(d) + np.float32(16.5), 0, 31)
        blocks = np.empty(len(values), dtype=Q5_0.dtype)
        blocks["d"] = d[:, 0]
        _store_five_bits(blocks, q.view(np.uint8))
        return blocks


class Q5_1:  # noqa: N801
    """32 numbers of five bits, a scale and a minimum: x = d * q + m.

        | d f16 | m f16 | qh u32 | qs u8 x 16 |      24 bytes; quants as in Q5_0
    """

    ggml_type = 7
    block_size = 32
    nbytes = 24
    dtype = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        return column(blocks["d"]) * _five_bits(blocks) + column(blocks["m"])

    @staticmethod
    def encode(values: Floats) -> Blocks:
        low = values.min(axis=1, keepdims=True)
        d = (values.max(axis=1, keepdims=True) - low) / np.float32(31)
        q = bounded((values - low) * reciprocal(d) + np.float32(0.5), 0, 31)
        blocks = np.empty(len(values), dtype=Q5_1.dtype)
        blocks["d"] = d[:, 0]
        blocks["m"] = low[:, 0]
        _store_five_bits(blocks, q.view(np.uint8))
        return blocks


def _five_bits(blocks: Blocks) -> Bytes:
    """The 32 numbers 0..31 of each block."""
    high = np.unpackbits(blocks["qh"], axis=1, bitorder="little")
    return nibbles(blocks["qs"]) | (high << np.uint8(4))


def _store_five_bits(blocks: Blocks, q: Bytes) -> None:
    blocks["qs"] = pack_nibbles((q & 15).view(np.int8))
    blocks["qh"] = np.packbits(q >> 4, axis=1, bitorder="little")
