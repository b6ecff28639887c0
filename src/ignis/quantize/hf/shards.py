"""The safetensors files of a checkpoint, as one table of tensors that are read by rows.

The `safetensors` package maps a file, checks its header and copies out the rows asked for;
`ml_dtypes` lends NumPy the name of bfloat16, which the package needs for it. Both come with
`pip install 'ignis-llm[convert]'`. Files are opened for each chunk of rows: that takes a fraction
of a millisecond, and a map that is gone again does not count as memory of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ignis.errors import ModelFileError, UnsupportedModelError, UsageError
from ignis.quantize.hf.config import read_object
from ignis.quantize.hf.tensors import Stored
from ignis.quantize.source import Rows

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FORMATS: Mapping[str, str] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


def shard_paths(folder: Path) -> list[Path]:
    """The files that hold the tensors, as the index names them, or the only one."""
    if (index := folder / _INDEX).exists():
        return [folder / name for name in _named_by(index)]
    if (single := folder / _SINGLE).exists():
        return [single]
    others = sorted(path.name for path in folder.glob("*.bin"))
    raise ModelFileError("no safetensors", where=folder, got=", ".join(others[:4]) or "nothing",
                         wanted=f"{_SINGLE} or {_INDEX}")


def _named_by(index: Path) -> list[str]:
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelFileError("bad weight_map", where=index, wanted="a file for each tensor")
    files = sorted({str(name) for name in names.values()})
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFileError("bad weight_map", where=index, got=repr(name),
                                 wanted="names of safetensors files in the same folder")
    return files


def read_shards(paths: list[Path]) -> dict[str, Stored]:
    """All tensors by name.

    Raises ModelFileError for a file that is missing, cut short or no safetensors file, and for a
    tensor that two files hold.
    """
    tensors: dict[str, Stored] = {}
    for path in paths:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name in tensors:
                    raise ModelFileError(f"tensor '{name}' is in two files", where=path)
                view = file.get_slice(name)
                shape = tuple(int(n) for n in view.get_shape())
                read = partial(_rows, path, name, shape)
                tensors[name] = Stored(name, shape, str(view.get_dtype()), read)
    return tensors


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    safe_open, error_type = _package()
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except FileNotFoundError:
        raise ModelFileError("file not found", where=path, hint="fetch the whole checkpoint"
                             ) from None
    except (OSError, error_type) as error:
        raise ModelFileError(f"not a safetensors file that can be read: {error}", where=path
                             ) from None


def _rows(path: Path, name: str, shape: tuple[int, ...], start: int, stop: int) -> Rows:
    with _opened(path) as file:
        view = file.get_slice(name)
        rows = view[start:stop] if len(shape) > 1 else view[:][None]
    return np.ascontiguousarray(rows).view(np.uint8).reshape(stop - start, -1)


def weight_format(stored: Stored, where: object) -> str:
    """The name of the format of a tensor's elements; only plain floats are weights."""
    if stored.dtype not in _FORMATS:
        raise UnsupportedModelError(f"tensor '{stored.name}' has an unsupported type", where=where,
                                    got=stored.dtype, wanted=" or ".join(_FORMATS),
                                    hint="take the checkpoint in BF16 or F16")
    return _FORMATS[stored.dtype]


def _package() -> tuple[Callable[..., Any], type[Exception]]:
    try:
        import ml_dtypes  # noqa: F401 (to be imported is what it is for)
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UsageError("reading safetensors needs two more packages",
                         hint="pip install 'ignis-llm[convert]'") from None
    return safe_open, SafetensorError
