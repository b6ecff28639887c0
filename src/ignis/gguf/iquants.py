"""IQ1, IQ2, IQ3: super-blocks of 256 values that are points of a grid, with signs or a shift.

A code names a point of eight values (IQ1, IQ2) or four (IQ3) in the format's grid (see
`gguf.grids`). In IQ2 and IQ3 it holds magnitudes, and there is a bit for the sign of each value;
where seven bits must do for eight, the number of minus signs is even. In IQ1 it holds -1, 0 and 1,
and all values of a code, or of 32 values, are moved by an eighth up or down. Scales are odd numbers
s = 1, 3, 5, ... for 32 values or for 16.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ignis.gguf.grids import grid
from ignis.gguf.records import Blocks, Bytes, Floats, column, fields

IQ2_MAGNITUDES = (8, 25, 43)
IQ3_XXS_MAGNITUDES = (4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S_MAGNITUDES = (1, 3, 5, 7, 9, 11, 13, 15)
"""What the digits of a grid's points are worth."""

Codes: TypeAlias = NDArray[np.integer[Any]]

_EIGHT = np.arange(8, dtype=np.uint8)


class IQ2_XXS:  # noqa: N801 (ggml's names)
    """256 values: x = d * s / 8 * magnitude, signed; a scale for 32.

        | d f16 | for 32 values: codes u8 x 4, word u32 |      66 bytes

    Bits 7 j.. of `word` are the signs of code j, its top four bits (s - 1) / 2.
    """

    ggml_type = 16
    block_size = 256
    nbytes = 66
    dtype = np.dtype([("d", "<f2"), ("qs", [("codes", "u1", 4), ("word", "<u4")], 8)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        words = blocks["qs"]["word"]
        points = _magnitudes("iq2_xxs", IQ2_MAGNITUDES, blocks["qs"]["codes"])
        return _scaled(blocks, 8, _odd(words >> 28), points * _signs_of_words(words))


class IQ2_XS:  # noqa: N801
    """256 values: x = d * s / 8 * magnitude, signed; a scale for 16.

        | d f16 | qs u16 x 32 | scales u8 x 8 |      74 bytes

    Of each `qs` nine bits are a code and seven its signs; (s - 1) / 2 are the nibbles of `scales`,
    low ones first.
    """

    ggml_type = 17
    block_size = 256
    nbytes = 74
    dtype = np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        points = _magnitudes("iq2_xs", IQ2_MAGNITUDES, blocks["qs"] & 511)
        signs = _signs(_with_parity((blocks["qs"] >> 9).astype(np.uint8)))
        return _scaled(blocks, 8, _odd(_nibble_pairs(blocks["scales"])), points * signs)


class IQ2_S:  # noqa: N801
    """256 values: x = d * s / 8 * magnitude, signed; a scale for 16.

        | d f16 | qs u8 x 32 | signs u8 x 32 | qh u8 x 8 | scales u8 x 8 |      82 bytes

    Codes of ten bits: the high two of code 4 b + j are pair j of `qh[b]`; a bit of `signs` for each
    value; scales as in IQ2_XS.
    """

    ggml_type = 22
    block_size = 256
    nbytes = 82
    dtype = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8),
                      ("scales", "u1", 8)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        codes = _wide_codes(blocks["qs"], blocks["qh"], 2)
        points = _magnitudes("iq2_s", IQ2_MAGNITUDES, codes)
        scales = _odd(_nibble_pairs(blocks["scales"]))
        return _scaled(blocks, 8, scales, points * _signs(blocks["signs"]))


class IQ3_XXS:  # noqa: N801
    """256 values: x = d * s / 4 * magnitude, signed; a scale for 32.

        | d f16 | codes u8 x 64 | words u32 x 8 |      98 bytes; words as in IQ2_XXS
    """

    ggml_type = 18
    block_size = 256
    nbytes = 98
    dtype = np.dtype([("d", "<f2"), ("codes", "u1", 64), ("words", "<u4", 8)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        points = _magnitudes("iq3_xxs", IQ3_XXS_MAGNITUDES, blocks["codes"])
        words = blocks["words"]
        return _scaled(blocks, 4, _odd(words >> 28), points * _signs_of_words(words))


class IQ3_S:  # noqa: N801
    """256 values: x = d * s * magnitude, signed; a scale for 32.

        | d f16 | qs u8 x 64 | qh u8 x 8 | signs u8 x 32 | scales u8 x 4 |      110 bytes

    Codes of nine bits: the high one of code 8 b + j is bit j of `qh[b]`; a bit of `signs` for each
    value; (s - 1) / 2 are the nibbles of `scales`, low ones first.
    """

    ggml_type = 21
    block_size = 256
    nbytes = 110
    dtype = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32),
                      ("scales", "u1", 4)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        codes = _wide_codes(blocks["qs"], blocks["qh"], 1)
        points = _magnitudes("iq3_s", IQ3_S_MAGNITUDES, codes)
        scales = _odd(_nibble_pairs(blocks["scales"]))
        return _scaled(blocks, 1, scales, points * _signs(blocks["signs"]))


class IQ1_S:  # noqa: N801
    """256 values: x = d * s * (digit - 1 +- 1/8); scale and shift for 32.

        | d f16 | qs u8 x 32 | qh u16 x 8 |      50 bytes

    qh[b]: bits 3 j.. are the high three of code 4 b + j, bits 12..14 (s - 1) / 2, bit 15 is set for
    a shift down.
    """

    ggml_type = 19
    block_size = 256
    nbytes = 50
    dtype = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        points = _digits(_wide_codes(blocks["qs"], blocks["qh"], 3))
        eighths = _eighths(points.reshape(-1, 8, 32), blocks["qh"] >> 15)
        return _scaled(blocks, 8, _odd(blocks["qh"] >> 12 & 7), eighths)


class IQ1_M:  # noqa: N801
    """256 values: x = d * s * (digit - 1 +- 1/8); a scale for 16, a shift for 8.

        | qs u8 x 32 | qh u8 x 16 | scales u16 x 4 |      56 bytes

    Nibble i of `qh`, low ones first: the high three bits of code i, and bit 3 set for a shift down.
    `scales[i]`: four times three bits of (s - 1) / 2, and at the top nibble i of d, an f16.
    """

    ggml_type = 29
    block_size = 256
    nbytes = 56
    dtype = np.dtype([("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        high = _nibble_pairs(blocks["qh"])
        points = _digits(blocks["qs"] | (high & 7).astype(np.uint16) << 8)
        scales = blocks["scales"][:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
        nibbles = blocks["scales"].astype(np.int32) >> 12 << np.arange(0, 16, 4)
        d = nibbles.sum(axis=1).astype(np.uint16).view(np.float16)
        eighths = _eighths(points, high >> 3)
        return _products(column(d), 8, _odd(scales.reshape(-1, 16)), eighths)


def _wide_codes(low: Bytes, high: Codes, n_bits: int) -> Codes:
    """Codes whose low eight bits are `low`; the next `n_bits` lie in `high`, lowest first."""
    per_word = low.shape[1] // high.shape[1]
    shifts = np.arange(0, n_bits * per_word, n_bits, dtype=high.dtype)
    bits = high[:, :, None] >> shifts & ((1 << n_bits) - 1)
    return low | bits.reshape(low.shape).astype(np.uint16) << 8


def _magnitudes(name: str, worth: tuple[int, ...], codes: Codes) -> Floats:
    """[n, ..] codes -> f32 [n, 32, 8], unsigned values."""
    points: Floats = np.array(worth, np.float32)[grid(name)][codes]
    return points.reshape(len(codes), 32, 8)


def _digits(codes: Codes) -> Bytes:
    """[n, 32] codes of IQ1 -> [n, 32, 8] digits: 0, 1, 2 for -1, 0, 1."""
    digits: Bytes = grid("iq1_s")[codes]
    return digits


def _eighths(digits: Bytes, down: Codes) -> Floats:
    """Digits of IQ1, shifted up by an eighth or down where `down` is 1; in eighths."""
    up = 1 - 2 * down.astype(np.float32)[:, :, None]
    return 8 * (digits.astype(np.float32) - 1) + up


def _with_parity(seven: Bytes) -> Bytes:
    """Seven bits of signs and an eighth that makes their number even."""
    parity = seven ^ (seven >> np.uint8(4))
    parity ^= parity >> np.uint8(2)
    parity ^= parity >> np.uint8(1)
    return seven | ((parity & np.uint8(1)) << np.uint8(7))


def _signs_of_words(words: Codes) -> Floats:
    """Words of four times seven bits [n, 8] -> f32 [n, 32, 8], 1 and -1."""
    seven = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    return _signs(_with_parity(seven.reshape(len(words), 32).astype(np.uint8)))


def _signs(bits: Bytes) -> Floats:
    """Bytes [n, 32], a bit a value -> f32 [n, 32, 8]: -1 where it is set, else 1."""
    return 1 - 2 * (bits[:, :, None] >> _EIGHT & 1).astype(np.float32)


def _nibble_pairs(scales: Bytes) -> Bytes:
    """[n, m] bytes -> [n, 2 m]: the low and the high nibble of each."""
    return fields(scales.reshape(-1, 1), 4).reshape(len(scales), -1)


def _odd(numbers: Codes) -> Floats:
    """2 n + 1."""
    return 2 * numbers.astype(np.float32) + 1


def _scaled(blocks: Blocks, divisor: int, scales: Floats, values: Floats) -> Floats:
    return _products(column(blocks["d"]), divisor, scales, values)


def _products(d: Floats, divisor: int, scales: Floats, values: Floats) -> Floats:
    """d * scale / divisor * value, which is exact, with one scale for each part of the 256."""
    n, n_scales = scales.shape
    factors = d * (scales / np.float32(divisor))
    out: Floats = (factors[:, :, None] * values.reshape(n, n_scales, -1)).reshape(n, 256)
    return out
