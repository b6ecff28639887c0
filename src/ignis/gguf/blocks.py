"""The weight formats: one class each, with its fields, its size and its meaning in NumPy.

A row of K weights is stored as K / block_size blocks, one after the other. A format class holds
the fields of one block, `decode` and, where there is an encoder, `encode`; `BLOCKS` has them by
name. To add a format is to add a class to one of the modules beside this one (`classic`,
`kquants`, `codebooks`) and to list it in `_FORMATS`.

Formats that Ignis cannot compute with are in `BLOCKS` too, with `supported` False: `ignis info`
lists files that hold them. Source of ids and sizes: `ggml_type` and its traits in ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.errors import UnsupportedModelError, UsageError
from ignis.gguf.classic import BF16, F16, F32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from ignis.gguf.codebooks import IQ4_NL, IQ4_XS, MXFP4, TQ1_0, TQ2_0
from ignis.gguf.iquants import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS
from ignis.gguf.kquants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from ignis.gguf.records import Blocks, Bytes, Floats, Format

# Values converted at a time. Encoders search with about ten arrays of this size, which stay in the
# outer cache; with smaller ones, threads would spend their time on the interpreter's lock.
_CHUNK_VALUES = 1 << 18


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
            raise UnsupportedModelError(
                f"weights of type {self.name} cannot be decoded yet",
                hint="take the model in another quantization, such as Q4_K_M or Q8_0",
            )
        assert raw.dtype == np.uint8 and raw.shape[-1] % self.nbytes == 0, (raw.dtype, raw.shape)
        blocks = np.ascontiguousarray(raw).reshape(-1).view(self.dtype)
        out = np.empty((len(blocks), self.block_size), dtype=np.float32)
        step = _CHUNK_VALUES // self.block_size
        with np.errstate(all="ignore"):
            for start in range(0, len(blocks), step):
                out[start : start + step] = self._decode(blocks[start : start + step])
        return out.reshape(*raw.shape[:-1], raw.shape[-1] // self.nbytes * self.block_size)

    def encode(self, values: NDArray[np.floating[Any]]) -> Bytes:
        """Encode float32 [..., k] to uint8 [..., row_nbytes(k)], without warnings.

        A block's bytes depend on its own values alone: rows may be cut and spread over threads at
        will, best by 2^18 values or more, and temporaries take some 10 MB a thread. A NaN, an
        infinity or a value beyond what the format's f16 scale reaches gives a block that decodes
        to no finite number. Raises UsageError for a row length that blocks do not divide or a
        format without an encoder.
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


_FORMATS: tuple[type[Format], ...] = (
    F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS,
    MXFP4, TQ1_0, TQ2_0, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S,
)  # fmt: skip

_LISTED_ONLY = (    # name, ggml_type, block_size, nbytes
    ("q8_1", 9, 32, 36), ("q8_k", 15, 256, 292), ("i8", 24, 1, 1), ("i16", 25, 1, 2),
    ("i32", 26, 1, 4), ("i64", 27, 1, 8), ("f64", 28, 1, 8), ("nvfp4", 40, 64, 36),
    ("q1_0", 41, 128, 18),
)

# Ids that ggml once gave out and took back: files that hold them must be made anew.
REMOVED_TYPES: Mapping[int, str] = MappingProxyType({
    4: "q4_2", 5: "q4_3", 31: "q4_0_4_4", 32: "q4_0_4_8", 33: "q4_0_8_8",
    36: "iq4_nl_4_4", 37: "iq4_nl_4_8", 38: "iq4_nl_8_8",
})


def _declared(cls: type[Format]) -> BlockFormat:
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
