"""Models in several files: `name-00001-of-00003.gguf` and so on.

Every part is a GGUF file of its own with the keys `split.no` (from 0), `split.count` and
`split.tensors.count` (of all parts); the first one carries the model's metadata. Source: ggml's
`gguf-split`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ignis.errors import ModelFileError
from ignis.gguf.parse import Header, TensorInfo, shown

_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


def part_paths(path: Path, header: Header) -> tuple[Path, ...]:
    """Return the paths of all parts of the model that `path` belongs to; of one file, itself."""
    count = _integer(path, header, "split.count", default=1)
    if count is None or count <= 1:
        return (path,)
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelFileError(
            "name of a part of a split model", where=path, got=f"split.count {count} in the file",
            wanted=f"a name that ends in -0000?-of-{count:05}.gguf",
            hint="keep the names that the parts were published under")
    return tuple(path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
                 for number in range(1, count + 1))


def check_part(path: Path, header: Header, index: int, count: int) -> None:
    """Raise ModelFileError unless the file says that it is part `index` of `count`."""
    for key, wanted in (("split.count", count), ("split.no", index)):
        if (got := _integer(path, header, key, default=None)) != wanted:
            raise ModelFileError(f"metadata '{key}'", where=path, wanted=wanted,
                                 got="nothing" if got is None else got)


def merge_tensors(paths: tuple[Path, ...], headers: list[Header]) -> dict[str, TensorInfo]:
    """Join the parts' tensor tables; no name twice, and as many as the first part says."""
    tensors: dict[str, TensorInfo] = {}
    for path, header in zip(paths, headers, strict=True):
        _check_disjoint(path, tensors, header.tensors)
        tensors |= header.tensors
    wanted = _integer(paths[0], headers[0], "split.tensors.count", default=len(tensors))
    if len(tensors) != wanted:
        raise ModelFileError("metadata 'split.tensors.count'", where=paths[0], got=wanted,
                             wanted=f"{len(tensors)}, as the parts hold together")
    return tensors


def _check_disjoint(path: Path, seen: Mapping[str, TensorInfo],
                    new: Mapping[str, TensorInfo]) -> None:
    for name in new:
        if name in seen:
            raise ModelFileError("duplicate tensor", where=path, got=shown(name),
                                 wanted="each name once in all parts")


def _integer(path: Path, header: Header, key: str, default: int | None) -> int | None:
    value = header.metadata.get(key, default)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ModelFileError(f"metadata '{key}'", where=path, got=type(value).__name__,
                             wanted="an integer")
    return value
