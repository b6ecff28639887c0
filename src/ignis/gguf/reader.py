"""Open a GGUF model: map its file or files, check everything, hand out views.

Nothing is copied but the short strings. The weights stay in the mapped file, which the system
pages in as they are read and can drop again without writing them anywhere.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from ignis.errors import ModelFileError
from ignis.gguf.parse import Header, TensorInfo, parse_header, shown
from ignis.gguf.split import check_part, merge_tensors, part_paths
from ignis.gguf.strings import StringArray
from ignis.gguf.values import MetaValue

V = TypeVar("V")

_KIND_NAMES: Mapping[type, str] = MappingProxyType({
    int: "an integer", float: "a number", bool: "a bool", str: "a string",
    np.ndarray: "an array of numbers", StringArray: "an array of strings",
    tuple: "an array of arrays"})


class MappedFile(NamedTuple):
    """One file in memory, read-only: `data` is uint8 [file size], at virtual `address`."""

    path: Path
    map: mmap.mmap
    data: NDArray[np.uint8]

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    def close(self) -> None:
        """Unmap, or, while arrays still look into the map, leave that to the last of them."""
        with suppress(BufferError):
            self.map.close()


class GGUFFile:
    """A model on disk: typed metadata and mapped tensors. Made by `open_gguf`.

    path      the file, the first one of a split model
    version   2 or 3
    metadata  by key: int, float, bool, str; arrays of numbers as read-only NumPy views,
              of strings as StringArray, of arrays as tuples
    tensors   by name, of all parts
    """

    def __init__(self, files: tuple[MappedFile, ...], header: Header,
                 tensors: Mapping[str, TensorInfo]) -> None:
        self._files = files
        self.path = files[0].path
        self.version = header.version
        self.metadata: Mapping[str, MetaValue] = MappingProxyType(dict(header.metadata))
        self._places = header.places
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))

    @property
    def mappings(self) -> list[tuple[int, int, Path]]:
        """Return (address, nbytes, path) of every mapped file."""
        return [(f.address, len(f.data), f.path) for f in self._files]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files together."""
        return sum(len(f.data) for f in self._files)

    def tensor(self, name: str) -> TensorInfo:
        """Return a tensor's description; ModelFileError if the file has none of that name."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelFileError(f"tensor {shown(name)} is missing", where=self.path) from None

    def data(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes, uint8 [nbytes]: a read-only view of the map, not a copy."""
        info = self.tensor(name)
        return self._files[info.file_index].data[info.offset : info.offset + info.nbytes]

    def address(self, name: str) -> int:
        """Return the virtual address of a tensor's first byte; valid while this object lives."""
        info = self.tensor(name)
        return self._files[info.file_index].address + info.offset

    def array(self, name: str) -> NDArray[np.float32]:
        """Decode a whole tensor to float32 in its shape: for tests, references and small ones."""
        info = self.tensor(name)
        return info.format.decode(self.data(name)).reshape(info.shape)

    def require(self, key: str, kind: type[V]) -> V:
        """Return a metadata value of type `kind`; ModelFileError if it is absent or another.

        An integer passes for `float` (and is converted), a bool never for `int`.
        """
        value = self.metadata.get(key)
        if value is None:
            raise ModelFileError(f"metadata {shown(key)} is missing", where=self.path,
                                 wanted=_KIND_NAMES[kind])
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return cast(V, float(value))
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelFileError(f"metadata {shown(key)}", where=self.path, got=_describe(value),
                                 wanted=_KIND_NAMES[kind])
        return value

    @overload
    def get(self, key: str, default: None, kind: type[V]) -> V | None: ...
    @overload
    def get(self, key: str, default: V, kind: type[V] | None = None) -> V: ...
    def get(self, key: str, default: Any, kind: type[Any] | None = None) -> Any:
        """Return a metadata value, `default` if absent; of `kind`, else of the default's type."""
        if key not in self.metadata:
            return default
        return self.require(key, type(default) if kind is None else kind)

    def packed_value(self, key: str) -> bytes:
        """Return a metadata value as it stands in the file, type id first, to copy it exactly."""
        start, end = self._places[key]
        return self._files[0].data[start:end].tobytes()

    def close(self) -> None:
        """Let go of the maps. Views that are still held stay valid; addresses do not."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self.tensors)} tensors)"


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open and check a GGUF model; any part of a split one stands for the whole.

    Raises ModelFileError for a file that is missing, unreadable, cut short or inconsistent, in
    one line, before anything large is allocated.

    >>> with open_gguf("model.gguf") as f:                      # doctest: +SKIP
    ...     f.require("general.architecture", str), f.tensors["token_embd.weight"].shape
    ('llama', (49152, 576))
    """
    files: list[MappedFile] = []
    try:
        header = _open_part(Path(path), files)
        paths = part_paths(files[0].path, header)
        if paths[0] != files[0].path:
            files.pop().close()
            header = _open_part(paths[0], files, len(paths))
        headers = [header, *(_open_part(part, files, len(paths)) for part in paths[1:])]
        if len(paths) > 1:
            for index, part in enumerate(paths):
                check_part(part, headers[index], index, len(paths))
        return GGUFFile(tuple(files), header, merge_tensors(paths, headers))
    except BaseException:
        for file in files:
            file.close()
        raise


def _open_part(path: Path, files: list[MappedFile], n_parts: int = 1) -> Header:
    """Map one more file and parse its header; `files` owns the map from then on."""
    file = _map(path, f"part {len(files) + 1} of {n_parts}" if n_parts > 1 else None)
    files.append(file)
    return parse_header(path, file.map, file.data, len(files) - 1)


def _map(path: Path, hint: str | None) -> MappedFile:
    try:
        # Asked before opening: to open a pipe would wait for its other end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelFileError("cannot open model", where=path, got="not a regular file",
                                 wanted="a GGUF file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError("cannot open model", where=path, got="an empty file",
                                     wanted="a GGUF file")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError("model file not found", where=path, hint=hint) from None
    except (OSError, ValueError) as error:      # ValueError: a path with a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelFileError(f"cannot open model: {reason}", where=path) from None
    return MappedFile(path, mapped, np.frombuffer(mapped, dtype=np.uint8))


def _describe(value: MetaValue) -> str:
    """Say what a value is, and the value itself where it is short."""
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype.name}"
    if isinstance(value, StringArray | tuple):
        return f"{_KIND_NAMES[type(value)]}, {len(value)} of them"
    return f"{type(value).__name__} {shown(str(value))}"
