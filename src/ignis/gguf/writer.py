"""Write GGUF files: random models for tests, conversions, fixtures.

Tensor data may be given as a function that makes it, whole or in pieces, so that a model far
larger than memory can be written. The file appears under its name only when it is complete.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from struct import error as StructError  # noqa: N812 (an exception, whatever its case)
from struct import pack
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ignis.errors import UsageError
from ignis.gguf.atomic import written_whole
from ignis.gguf.blocks import BLOCKS, BlockFormat
from ignis.gguf.strings import StringArray
from ignis.gguf.values import DEFAULT_ALIGNMENT, DTYPES, MAGIC, STRUCTS, ValueType

FloatSource: TypeAlias = "NDArray[Any] | Callable[[], NDArray[Any]]"
RawSource: TypeAlias = "bytes | NDArray[np.uint8] | Callable[[], bytes | NDArray[np.uint8]]"
Pieces: TypeAlias = "Callable[[], Iterable[bytes | memoryview]]"

_CHUNK_VALUES = 1 << 22     # values encoded at a time: 16 MB of floats


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    nbytes: int
    pieces: Pieces


class GGUFWriter:
    """Collects metadata and tensors, then writes them in one go.

    >>> writer = GGUFWriter("tiny.gguf", "llama")               # doctest: +SKIP
    ... writer.add("llama.block_count", 2)
    ... writer.add_tensor("output.weight", np.zeros((32, 64), np.float32), "q8_0")
    ... writer.write()
    """

    def __init__(self, path: str | os.PathLike[str], architecture: str | None, *,
                 version: int = 3, alignment: int = DEFAULT_ALIGNMENT) -> None:
        if version not in (2, 3):
            raise UsageError("GGUF version to write", got=version, wanted="2 or 3")
        if alignment < 8 or alignment & (alignment - 1):
            raise UsageError("GGUF alignment", got=alignment, wanted="a power of two from 8")
        self.path = Path(path)
        self._version, self._alignment = version, alignment
        self._metadata: dict[str, bytes] = {}
        self._tensors: dict[str, _Tensor] = {}
        if architecture is None:    # all metadata is copied from another file
            return
        self.add("general.architecture", architecture)
        if alignment != DEFAULT_ALIGNMENT:
            self.add("general.alignment", alignment, ValueType.UINT32)

    def add(self, key: str, value: object, type: ValueType | str | None = None) -> None:  # noqa: A002
        """Add one metadata value.

        Types are inferred where `type` is None: int -> UINT32, INT32, UINT64 or INT64, whichever
        holds it first; float -> FLOAT32; arrays of ints -> INT32 or INT64; a NumPy array keeps
        its own. For arrays, `type` is that of the innermost elements. Raises UsageError for a
        duplicate key or a value that does not fit.
        """
        kind = ValueType[type.upper()] if isinstance(type, str) else type
        try:
            packed = pack_value(value, kind)
        except (StructError, OverflowError, TypeError, ValueError) as error:
            raise UsageError(f"metadata value of '{key}' cannot be written: {error}",
                             where=self.path) from None
        self.add_packed(key, packed)

    def add_packed(self, key: str, value: bytes) -> None:
        """Add a metadata value as it stands in another file (`GGUFFile.packed_value`)."""
        if key in self._metadata:
            raise UsageError(f"metadata key '{key}' is there already", where=self.path)
        self._metadata[key] = value

    def add_tensor(self, name: str, array: FloatSource, format: str | BlockFormat = "f32",
                   *, shape: Sequence[int] | None = None) -> None:
        """Add a tensor of floats, [N, K] or [K], encoded to `format`.

        `array` may be a function, called once when the file is written; then `shape` is needed.
        """
        if shape is None:
            if callable(array):
                raise UsageError(f"tensor '{name}' comes from a function and needs a shape")
            shape = array.shape
        block = _block_format(format)
        if not block.encodable:
            block.encode(np.zeros((1, block.block_size), np.float32))   # raises and says why

        def pieces() -> Iterable[memoryview]:
            values = array() if callable(array) else array
            self._check_shape(name, values.shape, tuple(shape))
            rows = values.reshape(-1, values.shape[-1])
            step = max(1, _CHUNK_VALUES // rows.shape[1])
            for start in range(0, len(rows), step):
                yield block.encode(rows[start : start + step]).reshape(-1).data

        self._add(name, shape, block, pieces)

    def add_raw_tensor(self, name: str, shape: Sequence[int], format: str | BlockFormat,
                       data: RawSource) -> None:
        """Add a tensor whose bytes are in `format` already; `data` may be a function, too."""

        def pieces() -> Iterable[bytes | memoryview]:
            raw = data() if callable(data) else data
            yield raw if isinstance(raw, bytes) else np.ascontiguousarray(raw).reshape(-1).data

        self._add(name, shape, _block_format(format), pieces)

    def add_pieces(self, name: str, shape: Sequence[int], format: str | BlockFormat,
                   pieces: Pieces) -> None:
        """Add a tensor whose bytes come piece by piece from a function, called once."""
        self._add(name, shape, _block_format(format), pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that were added, padding included."""
        return sum(self._aligned(tensor.nbytes) for tensor in self._tensors.values())

    def write(self, check: Callable[[Path], None] | None = None) -> None:
        """Write the file: under a temporary name in its folder, then renamed into place.

        `check` may look at the complete file under its temporary name, and refuse it by raising.
        """
        with written_whole(self.path, check) as file:
            self._write_to(file)

    def _add(self, name: str, shape: Sequence[int], block: BlockFormat, pieces: Pieces) -> None:
        if name in self._tensors:
            raise UsageError(f"tensor '{name}' is there already", where=self.path)
        shape = tuple(int(n) for n in shape)
        if not 1 <= len(shape) <= 4 or min(shape) < 1:
            raise UsageError(f"shape of tensor '{name}'", where=self.path, got=shape,
                             wanted="1 to 4 dimensions, each at least 1")
        nbytes = math.prod(shape[:-1]) * block.row_nbytes(shape[-1])
        self._tensors[name] = _Tensor(name, shape, block, nbytes, pieces)

    def _write_to(self, file: BinaryIO) -> None:
        file.write(MAGIC + pack("<IQQ", self._version, len(self._tensors), len(self._metadata)))
        for key, value in self._metadata.items():
            file.write(_pack_string(key) + value)
        offset = 0
        for tensor in self._tensors.values():
            dims = tensor.shape[::-1]
            file.write(_pack_string(tensor.name) + pack(f"<I{len(dims)}Q", len(dims), *dims)
                       + pack("<IQ", tensor.format.ggml_type, offset))
            offset = self._aligned(offset + tensor.nbytes)
        for tensor in self._tensors.values():
            file.write(bytes(self._aligned(file.tell()) - file.tell()))
            start = file.tell()
            for piece in tensor.pieces():
                file.write(piece)
            if file.tell() - start != tensor.nbytes:
                raise UsageError(f"bytes of tensor '{tensor.name}'", where=self.path,
                                 got=file.tell() - start, wanted=tensor.nbytes)
        file.write(bytes(self._aligned(file.tell()) - file.tell()))

    def _aligned(self, offset: int) -> int:
        return -(-offset // self._alignment) * self._alignment

    def _check_shape(self, name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if got != wanted:
            raise UsageError(f"shape of tensor '{name}'", where=self.path, got=got, wanted=wanted)


def _block_format(format: str | BlockFormat) -> BlockFormat:
    if isinstance(format, BlockFormat):
        return format
    if format not in BLOCKS:
        raise UsageError("weight format", got=format, wanted=", ".join(BLOCKS))
    return BLOCKS[format]


def pack_value(value: object, kind: ValueType | None = None) -> bytes:
    """Type id and value, as they stand after a key."""
    if isinstance(value, np.ndarray | list | tuple | StringArray):
        return pack("<I", ValueType.ARRAY) + _pack_array(value, kind)
    kind = _scalar_kind(value) if kind is None else kind
    return pack("<I", kind) + _pack_scalar(value, kind)


def _pack_scalar(value: Any, kind: ValueType) -> bytes:
    if kind is ValueType.STRING:
        return _pack_string(value)
    if kind is ValueType.ARRAY:
        raise TypeError(f"{type(value).__name__} is not an array")
    return STRUCTS[kind].pack(value)


def _pack_array(value: Sequence[Any] | NDArray[Any], kind: ValueType | None) -> bytes:
    """Element type, count and elements; the elements of nested arrays carry their own type."""
    head = "<IQ"
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise TypeError(f"an array of {value.ndim} dimensions")
        kind = _array_kind(value) if kind is None else kind
        exact = value.astype(DTYPES[kind], casting="same_kind")
        return pack(head, kind, len(value)) + exact.tobytes()
    if isinstance(value, StringArray):
        return pack(head, ValueType.STRING, len(value)) + b"".join(
            map(_pack_string, value.iter_bytes()))
    if any(isinstance(item, list | tuple | np.ndarray | StringArray) for item in value):
        return pack(head, ValueType.ARRAY, len(value)) + b"".join(
            _pack_array(item, kind) for item in value)
    if kind is None:
        kind = _list_kind(value)
    return pack(head, kind, len(value)) + b"".join(_pack_scalar(item, kind) for item in value)


def _pack_string(text: str | bytes) -> bytes:
    if not isinstance(text, str | bytes):
        raise TypeError(f"{type(text).__name__} is not a string")
    raw = text.encode() if isinstance(text, str) else text
    return pack("<Q", len(raw)) + raw


def _scalar_kind(value: object) -> ValueType:
    if isinstance(value, bool | np.bool_):
        return ValueType.BOOL
    if isinstance(value, str | bytes):
        return ValueType.STRING
    if isinstance(value, np.generic):
        return _array_kind(np.asarray(value))
    if isinstance(value, float):
        return ValueType.FLOAT32
    if isinstance(value, int):
        for kind in (ValueType.UINT32, ValueType.INT32, ValueType.UINT64, ValueType.INT64):
            limits = np.iinfo(DTYPES[kind])
            if limits.min <= value <= limits.max:
                return kind
        raise OverflowError(f"{value} is outside 64 bits")
    raise TypeError(f"no GGUF type for {type(value).__name__}")


def _list_kind(items: Sequence[Any]) -> ValueType:
    """The common type of a list; an empty one becomes an array of INT32."""
    kinds = {_scalar_kind(item) for item in items}
    if len(kinds) == 1 and (kind := kinds.pop()) not in (ValueType.UINT32, ValueType.UINT64):
        return kind
    if any(isinstance(item, float) for item in items):
        return ValueType.FLOAT32
    limits = np.iinfo(np.int32)
    fits = all(limits.min <= item <= limits.max for item in items)
    return ValueType.INT32 if fits else ValueType.INT64


def _array_kind(array: NDArray[Any]) -> ValueType:
    for kind, dtype in DTYPES.items():
        if dtype == array.dtype:
            return kind
    raise TypeError(f"no GGUF type for NumPy's {array.dtype}")
