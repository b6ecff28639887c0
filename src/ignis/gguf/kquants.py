"""The K-quants: super-blocks of 256 values, whose sub-blocks have small integer scales.

A sub-block's scale is the super-block's f16 scale times an integer of 4, 6 or 8 bits. Q4_K and
Q5_K have 8 sub-blocks of 32, the others 16 of 16. Where there are minimums they are subtracted.
"""

from __future__ import annotations

import numpy as np

from ignis.gguf.encode_affine import AffineBlocks, encode_affine
from ignis.gguf.encode_scaled import PEAKS_OF_32, EveryInteger, encode_scaled
from ignis.gguf.records import Blocks, Bytes, Floats, column, fields, join_fields


class Q2_K:  # noqa: N801 (ggml's names)
    """256 numbers of two bits: x = d * sc * q - dmin * m.

        | scales u8 x 16 | qs u8 x 64 | d f16 | dmin f16 |      84 bytes

    Byte i of `scales` is sc (low nibble) and m (high) of values 16 i...; of each half of 128
    values byte i of 32 holds the values i, i + 32, i + 64, i + 96, lowest bits first.
    """

    ggml_type = 10
    block_size = 256
    nbytes = 84
    dtype = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        scale = column(blocks["d"]) * (blocks["scales"] & 15).astype(np.float32)
        minimum = column(blocks["dmin"]) * (blocks["scales"] >> 4).astype(np.float32)
        return _values(scale, quarters(blocks["qs"]), minimum)

    @staticmethod
    def encode(values: Floats) -> Blocks:
        # Without a floor under the weights zeros would count for nothing in a sparse row.
        found = encode_affine(values, n_scales=16, top=3, most=15, weight_floor=0.1)
        blocks = np.empty(len(values), dtype=Q2_K.dtype)
        blocks["d"], blocks["dmin"] = found.d, found.dmin
        blocks["scales"] = found.scales | (found.minimums << 4)
        blocks["qs"] = join_quarters(found.q)
        return blocks


class Q3_K:  # noqa: N801
    """256 numbers of three bits around 4: x = d * (sc - 32) * (q - 4).

        | hmask u8 x 32 | qs u8 x 64 | scales u8 x 12 | d f16 |      110 bytes

    The low two bits lie as in Q2_K; bit b of byte i of `hmask` is the third bit of value 32 b + i.
    Scales of six bits: the low four are the nibbles of bytes 0..7 (low ones first), the high two
    the pairs of bytes 8..11 (lowest pairs first).
    """

    ggml_type = 11
    block_size = 256
    nbytes = 110
    dtype = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        low, high = fields(blocks["scales"][:, :8], 4), fields(blocks["scales"][:, 8:], 2)
        scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
        q = quarters(blocks["qs"]) | (fields(blocks["hmask"], 1) << np.uint8(2))
        return _values(column(blocks["d"]) * scales, q.view(np.int8) - np.int8(4))

    @staticmethod
    def encode(values: Floats) -> Blocks:
        found = encode_scaled(values, EveryInteger(-4, 3), n_scales=16, least=-32, most=31,
                              peaks=PEAKS_OF_32)
        scales = (found.scales + np.int8(32)).view(np.uint8)
        q = (found.levels + np.int8(4)).view(np.uint8)
        blocks = np.empty(len(values), dtype=Q3_K.dtype)
        blocks["d"] = found.d
        blocks["scales"][:, :8] = join_fields(scales & np.uint8(15), 4)
        blocks["scales"][:, 8:] = join_fields(scales >> np.uint8(4), 2)
        blocks["qs"] = join_quarters(q & np.uint8(3))
        blocks["hmask"] = join_fields(q >> np.uint8(2), 1)
        return blocks


class Q4_K:  # noqa: N801
    """256 numbers of four bits: x = d * sc * q - dmin * m, eight pairs (sc, m) of six bits.

        | d f16 | dmin f16 | scales u8 x 12 | qs u8 x 128 |      144 bytes

    Byte i of 32 holds value i (low nibble) and i + 32 (high) of each 64. `scales`, a letter a bit,
    small ones for m:   0..3 EEAAAAAA ..   4..7 eeaaaaaa ..   8..11 eeeeEEEE ..
    """

    ggml_type = 12
    block_size = 256
    nbytes = 144
    dtype = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        return _values(*_scales_and_minimums(blocks, _alternate_nibbles(blocks["qs"])))

    @staticmethod
    def encode(values: Floats) -> Blocks:
        found = encode_affine(values, n_scales=8, top=15, most=63, weight_floor=1)
        blocks = np.empty(len(values), dtype=Q4_K.dtype)
        _store_scales_and_minimums(blocks, found)
        blocks["qs"] = _join_alternate_nibbles(found.q)
        return blocks


class Q5_K:  # noqa: N801
    """Q4_K with a fifth bit: bit b of byte i of `qh` is that of value 32 b + i.

        | d f16 | dmin f16 | scales u8 x 12 | qh u8 x 32 | qs u8 x 128 |      176 bytes
    """

    ggml_type = 13
    block_size = 256
    nbytes = 176
    dtype = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32),
                      ("qs", "u1", 128)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        high = fields(blocks["qh"], 1) << np.uint8(4)
        return _values(*_scales_and_minimums(blocks, _alternate_nibbles(blocks["qs"]) | high))

    @staticmethod
    def encode(values: Floats) -> Blocks:
        found = encode_affine(values, n_scales=8, top=31, most=63, weight_floor=1)
        blocks = np.empty(len(values), dtype=Q5_K.dtype)
        _store_scales_and_minimums(blocks, found)
        blocks["qs"] = _join_alternate_nibbles(found.q & np.uint8(15))
        blocks["qh"] = join_fields(found.q >> np.uint8(4), 1)
        return blocks


class Q6_K:  # noqa: N801
    """256 numbers of six bits around 32: x = d * sc * (q - 32), scales of eight bits.

        | ql u8 x 128 | qh u8 x 64 | scales i8 x 16 | d f16 |      210 bytes

    Of each half of 128 values byte i of 64 in `ql` holds the low nibbles of i and i + 64, byte i of
    32 in `qh` the high pairs of i, i + 32, i + 64, i + 96.
    """

    ggml_type = 14
    block_size = 256
    nbytes = 210
    dtype = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        low = fields(blocks["ql"].reshape(-1, 64), 4).reshape(len(blocks), 256)
        q = low | (quarters(blocks["qh"]) << np.uint8(4))
        return _values(column(blocks["d"]) * blocks["scales"], q.view(np.int8) - np.int8(32))

    @staticmethod
    def encode(values: Floats) -> Blocks:
        found = encode_scaled(values, EveryInteger(-32, 31), n_scales=16, least=-128, most=127,
                              peaks=(-128, -127, -126, -125, -120, -112, -96, -64))
        q = (found.levels + np.int8(32)).view(np.uint8)
        blocks = np.empty(len(values), dtype=Q6_K.dtype)
        blocks["d"], blocks["scales"] = found.d, found.scales
        blocks["ql"] = join_fields((q & np.uint8(15)).reshape(-1, 128), 4).reshape(-1, 128)
        blocks["qh"] = join_quarters(q >> np.uint8(4))
        return blocks


def quarters(qs: Bytes) -> Bytes:
    """[n, 64] bytes -> 256 pairs of bits: in each half of 32 bytes the lowest pairs first."""
    return fields(qs.reshape(-1, 32), 2).reshape(len(qs), 256)


def join_quarters(q: Bytes) -> Bytes:
    """The inverse of `quarters`."""
    return join_fields(q.reshape(-1, 128), 2).reshape(len(q), 64)


def _alternate_nibbles(qs: Bytes) -> Bytes:
    """[n, 128] bytes -> 256 nibbles: of each 32 bytes the low ones, then the high ones."""
    return fields(qs.reshape(-1, 32), 4).reshape(len(qs), 256)


def _join_alternate_nibbles(q: Bytes) -> Bytes:
    return join_fields(q.reshape(-1, 64), 4).reshape(len(q), 128)


def _scales_and_minimums(blocks: Blocks, q: Bytes) -> tuple[Floats, Bytes, Floats]:
    """What `_values` takes, from the 12 bytes that Q4_K draws."""
    low, middle, nibbles = (blocks["scales"][:, 4 * i : 4 * i + 4] for i in range(3))
    scales = np.concatenate([low & 63, (nibbles & 15) | ((low >> 2) & 48)], axis=1)
    minimums = np.concatenate([middle & 63, (nibbles >> 4) | ((middle >> 2) & 48)], axis=1)
    scale = column(blocks["d"]) * scales.astype(np.float32)
    return scale, q, column(blocks["dmin"]) * minimums.astype(np.float32)


def _store_scales_and_minimums(blocks: Blocks, found: AffineBlocks) -> None:
    """The inverse of `_scales_and_minimums`."""
    blocks["d"], blocks["dmin"] = found.d, found.dmin
    parts = blocks["scales"].reshape(-1, 3, 4)
    for i, numbers in enumerate((found.scales, found.minimums)):
        low, high = numbers[:, :4], numbers[:, 4:]
        parts[:, i] = low | ((high >> 4) << 6)
    parts[:, 2] = (found.scales[:, 4:] & 15) | (found.minimums[:, 4:] << 4)


def _values(scale: Floats, q: np.ndarray[tuple[int, ...], np.dtype[np.uint8 | np.int8]],
            minimum: Floats | None = None) -> Floats:
    """scale * q - minimum, with one scale for each sub-block of the 256 q."""
    n, n_scales = scale.shape
    values = scale[:, :, None] * q.reshape(n, n_scales, -1).astype(np.float32)
    if minimum is not None:
        values -= minimum[:, :, None]
    return values.reshape(n, 256)
