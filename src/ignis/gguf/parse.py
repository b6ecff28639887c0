"""One GGUF file's header: bytes -> metadata and tensor table, believing nothing.

    magic | version u32 | n_tensors u64 | n_keys u64
    n_keys    x ( key string | value type u32 | value )
    n_tensors x ( name string | n_dims u32 | dims u64 x n_dims | type u32 | offset u64 )
    padding to `general.alignment` | tensor data

Rules: a count is compared with the bytes that are left before anything is allocated or looped
over; whatever is walked one by one in Python (keys, strings, nested arrays, tensors) has a ceiling
far above any real model, so that no file takes more than about a second; sizes are Python
integers, which do not wrap. Source: the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from mmap import mmap
from pathlib import Path
from struct import Struct
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ignis.errors import ModelFileError, UnsupportedModelError
from ignis.gguf.blocks import BLOCKS_BY_TYPE, REMOVED_TYPES, BlockFormat
from ignis.gguf.strings import StringArray, StringWalkError, walk_strings
from ignis.gguf.values import (
    DEFAULT_ALIGNMENT,
    DTYPES,
    MAGIC,
    STRUCTS,
    MetaValue,
    ValueType,
)

VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_STRINGS = 1 << 22           # in all string arrays of a file; vocabularies have under 2^20
MAX_ARRAYS = 1 << 16            # arrays within arrays
MAX_DEPTH = 4                   # of arrays within arrays
MAX_TEXT_NBYTES = 1 << 24       # keys, names and plain strings, which are copied out of the file
MAX_NAME_NBYTES = (1 << 16) - 1
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16

_U32 = Struct("<I")
_U64 = Struct("<Q")
_MIN_KEY_NBYTES = 8 + 1 + 4 + 1             # a key of one letter, its type, a value of one byte
_MIN_TENSOR_NBYTES = 8 + 1 + 4 + 8 + 4 + 8  # a name of one letter, one dimension
_KINDS = "0 (UINT8) to 12 (FLOAT64)"

_OTHER_FILES = (    # first bytes, what they are
    (b"FUGG", "a big-endian GGUF file"),
    (b"version https://git-lfs", "a Git LFS pointer; fetch the file itself with `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive, perhaps a PyTorch checkpoint"),
    (b"lmgg", "a GGML file, older than GGUF"),
    (b"fmgg", "a GGMF file, older than GGUF"),
    (b"tjgg", "a GGJT file, older than GGUF"),
    (b"<", "an HTML or XML page"),
)


class TensorInfo(NamedTuple):
    """One row of the tensor table.

    shape       outermost first, as NumPy sees it: GGUF's [K, N] is (N, K), rows of K values
    offset      bytes from the start of its file
    nbytes      bytes of data
    file_index  which part of a split file holds it
    """

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int
    nbytes: int
    file_index: int


class Header(NamedTuple):
    """What a single file says: version, metadata by key, tensors by name.

    `places` has, by key, where the bytes of a value begin and end, its type id among them.
    """

    version: int
    metadata: Mapping[str, MetaValue]
    places: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, TensorInfo]


def parse_header(path: Path, buffer: mmap, data: NDArray[np.uint8], file_index: int) -> Header:
    """Parse the file that `buffer` maps and `data` views; ModelFileError unless all of it fits."""
    parser = _Parser(path, buffer, data)
    version = parser.version()
    n_tensors = parser.count("tensor count", _MIN_TENSOR_NBYTES, MAX_TENSORS)
    n_keys = parser.count("metadata count", _MIN_KEY_NBYTES, MAX_KEYS)
    metadata = parser.metadata(n_keys)
    alignment = _alignment(path, metadata)
    tensors = parser.tensors(n_tensors, alignment, file_index)
    _check_overlaps(path, tensors)
    return Header(version, metadata, parser.places, tensors)


class _Parser:
    """A position in the file, and what may still be spent on it."""

    def __init__(self, path: Path, buffer: mmap, data: NDArray[np.uint8]) -> None:
        self.path, self.buffer, self.data = path, buffer, data
        self.position, self.size = 0, len(data)
        self.places: dict[str, tuple[int, int]] = {}
        self.text_left, self.strings_left, self.arrays_left = (
            MAX_TEXT_NBYTES, MAX_STRINGS, MAX_ARRAYS)

    def fail(self, what: str, got: object, wanted: object, hint: str | None = None) -> NoReturn:
        raise ModelFileError(what, where=self.path, got=got, wanted=wanted, hint=hint)

    def take(self, nbytes: int, field: str) -> int:
        """Step over `nbytes`, which must be there; return where they start."""
        start = self.position
        if nbytes > self.size - start:
            self.fail(f"{field}: the file ends too early", f"{self.size - start} bytes at {start}",
                      f"{nbytes} bytes")
        self.position = start + nbytes
        return start

    def u32(self, field: str) -> int:
        value: int = _U32.unpack_from(self.buffer, self.take(4, field))[0]
        return value

    def u64(self, field: str) -> int:
        value: int = _U64.unpack_from(self.buffer, self.take(8, field))[0]
        return value

    def count(self, field: str, min_nbytes: int, ceiling: int) -> int:
        """Read a count of things of at least `min_nbytes` each."""
        n = self.u64(field)
        left = self.size - self.position
        if n * min_nbytes > left:
            self.fail(field, n, f"at most {left // min_nbytes}, as {left} bytes are left")
        if n > ceiling:
            self.fail(field, n, f"at most {ceiling}")
        return n

    def version(self) -> int:
        """Read magic and version, naming the kinds of file that people take for GGUF."""
        head = self.buffer[:32]
        for start, kind in _OTHER_FILES:
            if head.startswith(start):
                self.fail("not a GGUF file that can be read", kind, "little-endian GGUF")
        if not head.startswith(MAGIC):
            self.fail("not a GGUF file: magic", repr(head[:4])[1:], repr(MAGIC)[1:])
        self.position = 4
        version = self.u32("version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            self.fail("version", f"{swapped} of a big-endian file" if swapped < 256 else version,
                      "2 or 3, little-endian")
        return version

    def text(self, field: str, *, is_name: bool) -> str:
        """Read a string into Python; names must be UTF-8, other text gets U+FFFD."""
        nbytes = self.u64(f"{field}, length")
        if is_name and not 1 <= nbytes <= MAX_NAME_NBYTES:
            self.fail(f"{field}, length", nbytes, f"1 to {MAX_NAME_NBYTES} bytes")
        start = self.take(nbytes, field)
        self.text_left -= nbytes
        if self.text_left < 0:
            self.fail(f"{field}, length", nbytes, f"at most {MAX_TEXT_NBYTES} bytes of text in all")
        raw = self.buffer[start : start + nbytes]
        if not is_name:
            return raw.decode(errors="replace")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(field, repr(raw[:40])[1:], "UTF-8")

    # metadata -----------------------------------------------------------------------------------

    def metadata(self, n_keys: int) -> dict[str, MetaValue]:
        metadata: dict[str, MetaValue] = {}
        for index in range(n_keys):
            key = self.text(f"metadata key {index + 1} of {n_keys}", is_name=True)
            if key in metadata:
                self.fail("duplicate metadata key", shown(key), "each key once")
            start = self.position
            metadata[key] = self.value(f"metadata {shown(key)}")
            self.places[key] = start, self.position
        return metadata

    def kind(self, field: str) -> ValueType:
        number = self.u32(f"{field}, type")
        if number > ValueType.FLOAT64:
            self.fail(f"{field}, type", number, _KINDS)
        return ValueType(number)

    def value(self, field: str) -> MetaValue:
        kind = self.kind(field)
        if kind is ValueType.ARRAY:
            return self.array(field, depth=1)
        if kind is ValueType.STRING:
            return self.text(field, is_name=False)
        unpack = STRUCTS[kind]
        number: int | float = unpack.unpack_from(self.buffer, self.take(unpack.size, field))[0]
        if kind is not ValueType.BOOL:
            return number
        if number > 1:
            self.fail(f"{field}, bool", number, "0 or 1")
        return number == 1

    def array(self, field: str, depth: int) -> MetaValue:
        kind = self.kind(f"{field}, elements")
        if kind is ValueType.STRING:
            return self.strings(field)
        if kind is ValueType.ARRAY:
            if depth >= MAX_DEPTH:
                self.fail(f"{field}, depth of nested arrays", f"over {depth}",
                          f"at most {MAX_DEPTH}")
            n = self.count(f"{field}, array count", 12, self.arrays_left)
            self.arrays_left -= n
            return tuple(self.array(field, depth + 1) for _ in range(n))
        dtype = DTYPES[kind]
        n = self.count(f"{field}, array count", dtype.itemsize, self.size)
        start = self.take(n * dtype.itemsize, field)
        numbers = self.data[start : self.position]
        if kind is ValueType.BOOL and n and numbers.max() > 1:
            self.fail(f"{field}, bool", int(numbers.max()), "0 or 1")
        return numbers.view(dtype)

    def strings(self, field: str) -> StringArray:
        n = self.count(f"{field}, array count", 8, self.strings_left)
        self.strings_left -= n
        try:
            strings, self.position = walk_strings(self.buffer, self.data, self.position, n)
        except StringWalkError as error:
            self.fail(f"{field}, string {error.index + 1} of {n}", "an end beyond the file's",
                      f"at most {self.size} bytes in all")
        return strings

    # tensors ------------------------------------------------------------------------------------

    def tensors(self, n_tensors: int, alignment: int, file_index: int) -> dict[str, TensorInfo]:
        """Read the table; offsets count from the first aligned byte after it."""
        tensors: dict[str, TensorInfo] = {}
        for index in range(n_tensors):
            name = self.text(f"name of tensor {index + 1} of {n_tensors}", is_name=True)
            if name in tensors:
                self.fail("duplicate tensor", shown(name), "each name once")
            tensors[name] = self.tensor(name, alignment, file_index)
        data_start = -(-self.position // alignment) * alignment
        return {name: self.placed(info, data_start) for name, info in tensors.items()}

    def tensor(self, name: str, alignment: int, file_index: int) -> TensorInfo:
        field = f"tensor {shown(name)}"
        n_dims = self.u32(f"{field}, number of dimensions")
        if not 1 <= n_dims <= MAX_DIMS:
            self.fail(f"{field}, number of dimensions", n_dims, f"1 to {MAX_DIMS}")
        dims = [self.u64(f"{field}, dimension") for _ in range(n_dims)]
        if 0 in dims:
            self.fail(f"{field}, dimensions", dims, "each at least 1")
        block = self.block_format(field)
        if dims[0] % block.block_size:
            self.fail(f"{field}, row length", dims[0],
                      f"a multiple of {block.block_size} for type {block.name}")
        offset = self.u64(f"{field}, offset")
        if offset % alignment:
            self.fail(f"{field}, offset", offset, f"a multiple of the alignment {alignment}")
        nbytes = math.prod(dims) // block.block_size * block.nbytes
        return TensorInfo(name, tuple(reversed(dims)), block, offset, nbytes, file_index)

    def block_format(self, field: str) -> BlockFormat:
        number = self.u32(f"{field}, type")
        if block := BLOCKS_BY_TYPE.get(number):
            return block
        if removed := REMOVED_TYPES.get(number):
            raise UnsupportedModelError(f"{field}, type", where=self.path,
                                        got=f"{number} ({removed}), which ggml has withdrawn",
                                        wanted="a current type", hint="convert the model anew")
        return self.fail(f"{field}, type", number, f"a ggml type up to {max(BLOCKS_BY_TYPE)}")

    def placed(self, info: TensorInfo, data_start: int) -> TensorInfo:
        offset = data_start + info.offset
        if offset + info.nbytes > self.size:
            self.fail(f"tensor {shown(info.name)}, data", f"a file of {self.size} bytes",
                      f"{info.nbytes} bytes at {offset}", "the file may be cut short")
        return TensorInfo(info.name, info.shape, info.format, offset, info.nbytes, info.file_index)


def shown(name: str) -> str:
    """Quote a name from a file for a message; cut if absurdly long."""
    return f"'{name}'" if len(name) <= 80 else f"'{name[:77]}...'"


def _alignment(path: Path, metadata: Mapping[str, MetaValue]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (not isinstance(value, int) or isinstance(value, bool) or not 8 <= value <= MAX_ALIGNMENT
            or value & (value - 1)):
        shown_value = value if isinstance(value, int | float) else type(value).__name__
        raise ModelFileError("metadata 'general.alignment'", where=path, got=shown_value,
                             wanted=f"a power of two from 8 to {MAX_ALIGNMENT}")
    return value


def _check_overlaps(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    ordered = sorted(tensors.values(), key=lambda t: t.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise ModelFileError(
                f"tensor {shown(after.name)} overlaps {shown(before.name)}", where=path,
                got=f"offset {after.offset}",
                wanted=f"at least {before.offset + before.nbytes}")
