"""Formats whose four bits choose from a fixed list of values, and the ternary ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ignis.gguf.encode_scaled import PEAKS_OF_32, Codebook, encode_scaled
from ignis.gguf.kquants import join_quarters, quarters
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

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the sixteen codes of IQ4_NL and IQ4_XS stand for: denser around zero."""

FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of a float with two bits of exponent and one of fraction (OCP MX, E2M1)."""

_IQ4 = np.array(IQ4_VALUES, np.float32)
_IQ4_LEVELS = Codebook(IQ4_VALUES)
_FP4 = np.array(FP4_VALUES, np.float32)


class IQ4_NL:  # noqa: N801 (ggml's names)
    """32 codes and a scale: x = d * IQ4_VALUES[q].

        | d f16 | qs u8 x 16 |      18 bytes; nibbles as in Q4_0
    """

    ggml_type = 20
    block_size = 32
    nbytes = 18
    dtype = np.dtype([("d", "<f2"), ("qs", "u1", 16)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        return column(blocks["d"]) * _IQ4[nibbles(blocks["qs"])]

    @staticmethod
    def encode(values: Floats) -> Blocks:
        found = encode_scaled(values, _IQ4_LEVELS, n_scales=1, least=1, most=1, peaks=(1,))
        blocks = np.empty(len(values), dtype=IQ4_NL.dtype)
        blocks["d"] = found.d
        blocks["qs"] = pack_nibbles(_iq4_codes(found.levels))
        return blocks


class IQ4_XS:  # noqa: N801
    """256 codes, eight scales of six bits: x = d * (sc - 32) * IQ4_VALUES[q].

        | d f16 | scales_h u16 | scales_l u8 x 4 | qs u8 x 128 |      136 bytes

    Scale b is nibble b of `scales_l` and pair b of `scales_h`; each 16 bytes of `qs` hold 32
    values, nibbles as in Q4_0.
    """

    ggml_type = 23
    block_size = 256
    nbytes = 136
    dtype = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        low = (blocks["scales_l"][:, :, None] >> np.array([0, 4], np.uint8)) & np.uint8(15)
        high = (blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
        scales = low.reshape(-1, 8) + 16.0 * high - 32
        q = nibbles(blocks["qs"].reshape(-1, 16)).reshape(-1, 8, 32)
        scale = column(blocks["d"]) * scales.astype(np.float32)
        return (scale[:, :, None] * _IQ4[q]).reshape(-1, 256)

    @staticmethod
    def encode(values: Floats) -> Blocks:
        found = encode_scaled(values, _IQ4_LEVELS, n_scales=8, least=-32, most=31,
                              peaks=PEAKS_OF_32)
        scales = (found.scales + np.int8(32)).view(np.uint8)
        pairs = (scales >> np.uint8(4)).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
        blocks = np.empty(len(values), dtype=IQ4_XS.dtype)
        blocks["d"] = found.d
        blocks["scales_l"] = (scales[:, ::2] & np.uint8(15)) | (scales[:, 1::2] << np.uint8(4))
        blocks["scales_h"] = np.bitwise_or.reduce(pairs, axis=1)
        blocks["qs"] = pack_nibbles(_iq4_codes(found.levels).reshape(-1, 32)).reshape(-1, 128)
        return blocks


class MXFP4:
    """32 four-bit floats and a power of two: x = 2^(e - 128) * FP4_VALUES[q].

        | e u8 | qs u8 x 16 |      17 bytes; nibbles as in Q4_0
    """

    ggml_type = 39
    block_size = 32
    nbytes = 17
    dtype = np.dtype([("e", "u1"), ("qs", "u1", 16)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        return _halved_power(blocks["e"])[:, None] * _FP4[nibbles(blocks["qs"])]

    @staticmethod
    def encode(values: Floats) -> Blocks:
        largest = np.abs(values).max(axis=1)
        # The largest value's exponent less that of the largest code, 1.5 * 2^2.
        exponent = np.floor(np.log2(largest)) + (127 - 2)
        finite = np.isfinite(largest)
        e = np.where(largest > 0, exponent, 0).clip(0, 254)
        e = np.where(finite, e, 255).astype(np.uint8)
        q = _nearest_code(_halved_power(e), values)
        q[~finite] = 7      # 12 * 2^127: infinity, as there is no NaN
        blocks = np.empty(len(values), dtype=MXFP4.dtype)
        blocks["e"] = e
        blocks["qs"] = q[:, :16] | (q[:, 16:] << np.uint8(4))
        return blocks


class TQ1_0:  # noqa: N801
    """256 numbers from -1, 0, 1 and a scale, five to a byte: x = d * (t - 1).

        | qs u8 x 48 | qh u8 x 4 | d f16 |      54 bytes

    A byte is the fraction (digits t0 t1 t2 t3 t4 in base three) / 243 of 256, rounded up. Byte i of
    the first 32 holds the values i + 32 n, of the next 16 i + 160 + 16 n, of qh i + 240 + 4 n.
    """

    ggml_type = 34
    block_size = 256
    nbytes = 54
    dtype = np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        qs = blocks["qs"]
        parts = [_trits(qs[:, :32], 5), _trits(qs[:, 32:], 5), _trits(blocks["qh"], 4)]
        return column(blocks["d"]) * (np.concatenate(parts, axis=1).view(np.int8) - np.int8(1))

    @staticmethod
    def encode(values: Floats) -> Blocks:
        d, t = _ternary(values)
        blocks = np.empty(len(values), dtype=TQ1_0.dtype)
        blocks["d"] = d[:, 0]
        blocks["qs"][:, :32] = _join_trits(t[:, :160], 5)
        blocks["qs"][:, 32:] = _join_trits(t[:, 160:240], 5)
        blocks["qh"] = _join_trits(t[:, 240:], 4)
        return blocks


class TQ2_0:  # noqa: N801
    """256 numbers of two bits and a scale: x = d * (q - 1); pairs as in Q2_K.

        | qs u8 x 64 | d f16 |      66 bytes
    """

    ggml_type = 35
    block_size = 256
    nbytes = 66
    dtype = np.dtype([("qs", "u1", 64), ("d", "<f2")])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        return column(blocks["d"]) * (quarters(blocks["qs"]).view(np.int8) - np.int8(1))

    @staticmethod
    def encode(values: Floats) -> Blocks:
        d, t = _ternary(values)
        blocks = np.empty(len(values), dtype=TQ2_0.dtype)
        blocks["d"] = d[:, 0]
        blocks["qs"] = join_quarters(t)
        return blocks


def _iq4_codes(levels: NDArray[np.int8]) -> NDArray[np.int8]:
    """The code of each number of IQ4_VALUES; of zero, which a lost block has, the nearest."""
    return np.searchsorted(np.array(IQ4_VALUES, np.int8), levels).astype(np.int8)


def _halved_power(e: Bytes) -> Floats:
    """2^(e - 128) as f32: half of what the format's standard says, as the values are doubled."""
    wide = e.astype(np.uint32)
    subnormal = np.uint32(0x00200000) << (wide & 1)
    return np.where(wide < 2, subnormal, (wide - 1) << 23).astype(np.uint32).view(np.float32)


def _nearest_code(scale: Floats, values: Floats) -> Bytes:
    """The first of the sixteen values that comes closest, each: [n, 32] codes."""
    best = np.zeros(values.shape, np.uint8)
    least = np.full(values.shape, np.inf, np.float32)
    for code, value in enumerate(_FP4):
        error = np.abs(scale[:, None] * value - values)
        better = error < least
        best[better] = code
        least[better] = error[better]
    return best


def _ternary(values: Floats) -> tuple[Floats, Bytes]:
    """The scale [n, 1] and the numbers 0, 1, 2 that stand for -1, 0, 1."""
    d = np.abs(values).max(axis=1, keepdims=True)
    scaled = values * reciprocal(d)
    rounded = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled)
    return d, (bounded(rounded, -1, 1) + np.int8(1)).view(np.uint8)


def _trits(qs: Bytes, n: int) -> Bytes:
    """[n_blocks, m] bytes -> [n_blocks, n * m]: all first digits, then all second ones, ..."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:n, None]
    fractions = (qs[:, None, :] * powers).astype(np.uint16)     # wraps: drops the digits before
    return ((fractions * 3) >> 8).astype(np.uint8).reshape(len(qs), -1)


def _join_trits(t: Bytes, n: int) -> Bytes:
    """The inverse of `_trits`; the fifth digit of a byte with four counts as zero."""
    powers = np.array([81, 27, 9, 3, 1], np.uint16)[:n, None]
    whole = (t.reshape(len(t), n, -1) * powers).sum(axis=1, dtype=np.uint16)
    joined: Bytes = ((whole * 256 + 242) // 243).astype(np.uint8)
    return joined
