"""What is quantized: a model as tensors that are read a few rows at a time.

`GGUFSource` is a GGUF file; `hf.Checkpoint` makes the same of a Hugging Face directory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ignis.gguf import BlockFormat, GGUFFile
from ignis.gguf.values import DEFAULT_ALIGNMENT
from ignis.quantize.mix import ModelFacts
from ignis.runtime.guard import guard_mappings
from ignis.runtime.memory import drop_pages

Rows = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor to be read by rows.

    `read(start, stop)` gives rows as uint8 [stop - start, row_nbytes] in `format`; rows are those
    of the last axis, of all others together. `release(start, stop)` says that they have been read.
    """

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    read: Callable[[int, int], Rows]
    release: Callable[[int, int], None] = lambda start, stop: None

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.n_rows * self.format.row_nbytes(self.shape[-1])


class Source(Protocol):
    """A model to quantize. `paths` are the files it lies in, `metadata` is packed, in order."""

    @property
    def paths(self) -> Sequence[Path]: ...
    @property
    def metadata(self) -> Mapping[str, bytes]: ...
    @property
    def alignment(self) -> int: ...
    @property
    def tensors(self) -> Sequence[SourceTensor]: ...
    @property
    def facts(self) -> ModelFacts: ...
    def check(self, file: GGUFFile) -> None:
        """Look at the finished file once more, and refuse it by raising."""


class GGUFSource:
    """A GGUF model, of one file or of several. A context: the file is guarded while it is open."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._guards = ExitStack()
        self.paths = [path for _, _, path in file.mappings]
        self.metadata = {key: file.packed_value(key) for key in file.metadata
                         if not key.startswith("split.")}
        self.alignment = file.get("general.alignment", DEFAULT_ALIGNMENT)
        self.tensors = [self._tensor(name) for name in file.tensors]
        self.facts = _facts(file)

    def check(self, file: GGUFFile) -> None:
        """Nothing: the file is what it was, of an architecture that Ignis need not know."""

    def __enter__(self) -> Self:
        self._guards.callback(guard_mappings(self._file.mappings))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._guards.close()

    def _tensor(self, name: str) -> SourceTensor:
        info = self._file.tensor(name)
        rows = self._file.data(name).reshape(-1, info.format.row_nbytes(info.shape[-1]))

        def release(start: int, stop: int) -> None:
            """Let the system drop the pages: shared ones are read again if need be."""
            row_nbytes = rows.shape[1]
            first = self._file.address(name) + start * row_nbytes
            drop_pages(first, (stop - start) * row_nbytes)

        return SourceTensor(name, info.shape, info.format, lambda a, b: rows[a:b], release)


def _facts(file: GGUFFile) -> ModelFacts:
    """What the file says of itself; files of architectures that Ignis cannot run pass, too."""
    architecture = file.get("general.architecture", "")

    def number(key: str, default: int) -> int:
        value: Any = file.metadata.get(f"{architecture}.{key}", default)
        if isinstance(value, np.ndarray):   # one number a layer
            value = max(value.tolist(), default=0)
        return value if isinstance(value, int) else default

    n_heads = number("attention.head_count", 1)
    n_kv_heads = number("attention.head_count_kv", n_heads)
    return ModelFacts(n_layers=number("block_count", 0), group=n_heads // max(1, n_kv_heads),
                      n_experts=number("expert_count", 0), tied="output.weight" not in file.tensors)
