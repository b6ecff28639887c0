"""The weight formats: one class each, with its fields, its size and its meaning in NumPy.

A row of K weights is stored as K / block_size blocks, one after the other. A format class holds
the fields of one block, `decode` and, where a plain rounding encoder exists, `encode`; `BLOCKS`
has them by name. To add a format is to add a class and to list it in `_FORMATS`.

Formats that Ignis cannot compute with are in `BLOCKS` too, with `supported` False: `ignis info`
lists files that hold them. Source of ids and sizes: `ggml_type` and its traits in ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ignis.errors import UnsupportedModelError, UsageError

Blocks: TypeAlias = NDArray[np.void]        # [n_blocks], one structured record a block
Floats: TypeAlias = NDArray[np.float32]     # [n_blocks, block_size]
Bytes: TypeAlias = NDArray[np.uint8]

_CHUNK_VALUES = 1 << 18     # values converted at a time: keeps temporaries at a few MB


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a tensor's values are packed into blocks.

    name        as in `ignis info` and the IR: 'q4_1'
    ggml_type   the id in GGUF's tensor table
    block_size  values in a block (1 for plain floats and integers)
    nbytes      bytes of a block
    dtype       structured dtype of a block; opaque bytes where `supported` is False
    """

    name: str
    ggml_type: int
    block_size: int
    nbytes: int
    dtype: np.dtype[Any]
    _decode: Callable[[Blocks], Floats] | None = field(default=None, repr=False, compare=False)
    _encode: Callable[[Floats], Blocks] | None = field(default=None, repr=False, compare=False)

    @property
    def supported(self) -> bool:
        """Whether Ignis can decode this format, and so run models that use it."""
        return self._decode is not None

    @property
    def encodable(self) -> bool:
        """Whether `encode` exists."""
        return self._encode is not None

    def __str__(self) -> str:
        return self.name

    def row_nbytes(self, k: int) -> int:
        """Return the bytes of a row of `k` values; UsageError unless blocks divide it."""
        n_blocks, rest = divmod(k, self.block_size)
        if rest:
            raise UsageError(f"row length for format {self.name}", got=k,
                             wanted=f"a multiple of {self.block_size}")
        return n_blocks * self.nbytes

    def decode(self, raw: Bytes) -> NDArray[np.float32]:
        """Decode uint8 [..., n_blocks * nbytes] to float32 [..., n_blocks * block_size].

        Scales of NaN and infinity give what IEEE arithmetic gives, without warnings. Raises
        UnsupportedModelError where `supported` is False.
        """
        if self._decode is None:
            raise UnsupportedModelError(f"weights of type {self.name} cannot be decoded yet")
        assert raw.dtype == np.uint8 and raw.shape[-1] % self.nbytes == 0, (raw.dtype, raw.shape)
        blocks = np.ascontiguousarray(raw).reshape(-1).view(self.dtype)
        out = np.empty((len(blocks), self.block_size), dtype=np.float32)
        step = _CHUNK_VALUES // self.block_size
        with np.errstate(all="ignore"):
            for start in range(0, len(blocks), step):
                out[start : start + step] = self._decode(blocks[start : start + step])
        return out.reshape(*raw.shape[:-1], raw.shape[-1] // self.nbytes * self.block_size)

    def encode(self, values: NDArray[np.floating[Any]]) -> Bytes:
        """Encode float32 [..., k] by plain rounding to uint8 [..., row_nbytes(k)].

        A NaN in a block of a quantized format makes the whole block NaN. Raises UsageError for a
        row length that blocks do not divide or a format without an encoder.
        """
        if self._encode is None:
            raise UsageError(f"no encoder for weight format {self.name}",
                             wanted=", ".join(f.name for f in BLOCKS.values() if f.encodable))
        shape = (*values.shape[:-1], self.row_nbytes(values.shape[-1]))
        floats = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, self.block_size)
        out = np.empty(len(floats), dtype=self.dtype)
        step = _CHUNK_VALUES // self.block_size
        with np.errstate(all="ignore"):
            for start in range(0, len(floats), step):
                out[start : start + step] = self._encode(floats[start : start + step])
        return out.view(np.uint8).reshape(shape)


class _Format(Protocol):
    """What a format class declares; the class itself is the declaration, nobody makes one."""

    ggml_type: int
    block_size: int
    nbytes: int
    dtype: np.dtype[Any]

    @staticmethod
    def decode(blocks: Blocks) -> Floats: ...


class F32:
    """IEEE single precision."""

    ggml_type = 0
    block_size = 1
    nbytes = 4
    dtype = np.dtype([("x", "<f4")])

    @staticmethod
    def decode(blocks: Blocks) -> Floats:
        return _column(blocks["x"])

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
        return _column(blocks["x"])

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
        return blocks["qs"] * _column(blocks["d"])

    @staticmethod
    def encode(values: Floats) -> Blocks:
        d = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
        scaled = values * _reciprocal(d)
        magnitude = np.abs(scaled)
        whole = np.floor(magnitude)
        rounded = whole + (magnitude - whole >= 0.5)    # halves away from zero
        blocks = np.empty(len(values), dtype=Q8_0.dtype)
        blocks["d"] = d[:, 0]
        blocks["qs"] = _bounded(np.copysign(rounded, scaled), -127, 127)
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
        return _column(blocks["d"]) * (_nibbles(blocks["qs"]).view(np.int8) - np.int8(8))

    @staticmethod
    def encode(values: Floats) -> Blocks:
        # The value of largest magnitude becomes exactly -8, the one end that has no twin.
        extreme = np.abs(values).argmax(axis=1, keepdims=True)
        d = np.take_along_axis(values, extreme, axis=1) / np.float32(-8)
        q = _bounded(values * _reciprocal(d) + np.float32(8.5), 0, 15)
        blocks = np.empty(len(values), dtype=Q4_0.dtype)
        blocks["d"] = d[:, 0]
        blocks["qs"] = _pack_nibbles(q)
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
        return _column(blocks["d"]) * _nibbles(blocks["qs"]) + _column(blocks["m"])

    @staticmethod
    def encode(values: Floats) -> Blocks:
        low = values.min(axis=1, keepdims=True)
        d = (values.max(axis=1, keepdims=True) - low) / np.float32(15)
        q = _bounded((values - low) * _reciprocal(d) + np.float32(0.5), 0, 15)
        blocks = np.empty(len(values), dtype=Q4_1.dtype)
        blocks["d"] = d[:, 0]
        blocks["m"] = low[:, 0]
        blocks["qs"] = _pack_nibbles(q)
        return blocks


def _column(numbers: NDArray[Any]) -> Floats:
    """One number a block -> float32 [n_blocks, 1]."""
    return numbers.astype(np.float32)[:, None]


def _nibbles(qs: Bytes) -> Bytes:
    """[n, 16] bytes -> [n, 32] values 0..15: all low nibbles, then all high ones."""
    out = np.empty((len(qs), 32), dtype=np.uint8)
    np.bitwise_and(qs, 15, out=out[:, :16])
    np.right_shift(qs, 4, out=out[:, 16:])
    return out


def _pack_nibbles(q: NDArray[np.int8]) -> Bytes:
    """The inverse of `_nibbles`."""
    unsigned = q.view(np.uint8)
    return unsigned[:, :16] | (unsigned[:, 16:] << np.uint8(4))


def _reciprocal(d: Floats) -> Floats:
    """1 / d, and 0 for a block of zeros."""
    return np.where(d == 0, np.float32(0), np.float32(1) / d)


def _bounded(x: Floats, low: int, high: int) -> NDArray[np.int8]:
    """Truncate to integers in low..high. NaN gives 0 on every processor; a bare cast does not."""
    bounded: NDArray[np.int8] = np.nan_to_num(np.trunc(x).clip(low, high), nan=0.0).astype(np.int8)
    return bounded


_FORMATS: tuple[type[_Format], ...] = (F32, F16, BF16, Q8_0, Q4_0, Q4_1)

_LISTED_ONLY = (    # name, ggml_type, block_size, nbytes
    ("q5_0", 6, 32, 22), ("q5_1", 7, 32, 24), ("q8_1", 9, 32, 36),
    ("q2_k", 10, 256, 84), ("q3_k", 11, 256, 110), ("q4_k", 12, 256, 144),
    ("q5_k", 13, 256, 176), ("q6_k", 14, 256, 210), ("q8_k", 15, 256, 292),
    ("iq2_xxs", 16, 256, 66), ("iq2_xs", 17, 256, 74), ("iq3_xxs", 18, 256, 98),
    ("iq1_s", 19, 256, 50), ("iq4_nl", 20, 32, 18), ("iq3_s", 21, 256, 110),
    ("iq2_s", 22, 256, 82), ("iq4_xs", 23, 256, 136), ("i8", 24, 1, 1), ("i16", 25, 1, 2),
    ("i32", 26, 1, 4), ("i64", 27, 1, 8), ("f64", 28, 1, 8), ("iq1_m", 29, 256, 56),
    ("tq1_0", 34, 256, 54), ("tq2_0", 35, 256, 66), ("mxfp4", 39, 32, 17),
    ("nvfp4", 40, 64, 36), ("q1_0", 41, 128, 18),
)

# Ids that ggml once gave out and took back: files that hold them must be made anew.
REMOVED_TYPES: Mapping[int, str] = MappingProxyType({
    4: "q4_2", 5: "q4_3", 31: "q4_0_4_4", 32: "q4_0_4_8", 33: "q4_0_8_8",
    36: "iq4_nl_4_4", 37: "iq4_nl_4_8", 38: "iq4_nl_8_8",
})


def _declared(cls: type[_Format]) -> BlockFormat:
    assert cls.dtype.itemsize == cls.nbytes, f"{cls.__name__}: fields do not add up"
    return BlockFormat(cls.__name__.lower(), cls.ggml_type, cls.block_size, cls.nbytes, cls.dtype,
                       cls.decode, getattr(cls, "encode", None))


def _by_name() -> Mapping[str, BlockFormat]:
    formats = [_declared(cls) for cls in _FORMATS]
    formats += [BlockFormat(name, ggml_type, block_size, nbytes, np.dtype(f"V{nbytes}"))
                for name, ggml_type, block_size, nbytes in _LISTED_ONLY]
    formats.sort(key=lambda f: f.ggml_type)
    return MappingProxyType({f.name: f for f in formats})


BLOCKS: Mapping[str, BlockFormat] = _by_name()
BLOCKS_BY_TYPE: Mapping[int, BlockFormat] = MappingProxyType(
    {f.ggml_type: f for f in BLOCKS.values()})
