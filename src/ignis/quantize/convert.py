"""A model in, a GGUF file of another file type out: checked, streamed, verified, then renamed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ignis.errors import WriteError
from ignis.gguf import BLOCKS, BlockFormat, GGUFFile, GGUFWriter, open_gguf
from ignis.hub.progress import Progress, Silent
from ignis.quantize.encode import check_target, encoded_pieces
from ignis.quantize.mix import (
    QUANTIZATION_VERSION,
    Mix,
    fallback,
    find_mix,
    is_quantized,
    wanted_format,
)
from ignis.quantize.source import Source, SourceTensor
from ignis.quantize.target import check_path, check_room
from ignis.runtime.threads import available_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to quantize.

    type        a file type such as 'q4_k_m', or a format
    pure        every matrix in the type's own format
    requantize  also from tensors that have lost precision already
    force       overwrite a file that is there
    n_threads   None: all that this process may use
    """

    type: str
    pure: bool = False
    requantize: bool = False
    force: bool = False
    n_threads: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What was written: sizes are bytes of tensors.

    `fallbacks` counts tensors by the format that their rows are too short for and the one that
    they have now.
    """

    path: Path
    n_parameters: int
    nbytes_before: int
    nbytes_after: int
    fallbacks: Mapping[tuple[str, str], int]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes_after / self.n_parameters


@dataclass(frozen=True, slots=True)
class _Planned:
    tensor: SourceTensor
    format: BlockFormat
    wanted: str

    @property
    def nbytes(self) -> int:
        return self.tensor.n_rows * self.format.row_nbytes(self.tensor.shape[-1])


def quantize(source: Source, path: Path, options: Options, progress: Progress | None = None
             ) -> Report:
    """Write `source` to `path` as a GGUF file of type `options.type`.

    Metadata and tensors keep their order and, unless quantized, their bytes. The file appears
    under its name when it is complete and has been read again; until then there is nothing, or
    what was there before.

    Raises UsageError for an unknown type, a tensor that is quantized already, a target that is
    one of the source's files or is there already; NumericsError for weights that are not finite;
    WriteError for a disk that is full or refuses.
    """
    progress = progress or Silent()
    path = check_path(path, source.paths, options.force)
    mix = find_mix(options.type)
    plan = [_planned(tensor, mix, source, options) for tensor in source.tensors]
    n_threads = options.n_threads or available_threads()
    writer = GGUFWriter(path, None, alignment=source.alignment)
    _add_metadata(writer, source.metadata, mix)
    total = sum(tensor.nbytes for tensor in source.tensors)
    counter = _Counter(progress)
    with ThreadPoolExecutor(n_threads, "ignis-quantize") as executor:
        for entry in plan:
            pieces = partial(_pieces, entry, executor, n_threads, counter)
            writer.add_pieces(entry.tensor.name, entry.tensor.shape, entry.format, pieces)
        check_room(path, writer.nbytes)
        progress.begin(f"quantizing to {options.type.lower()}", total)
        try:
            writer.write(check=partial(_verify, plan=plan, source=source))
        except OSError as error:
            reason = error.strerror or str(error)
            raise WriteError(f"cannot write the model: {reason}", where=path) from error
        finally:
            progress.end()
    progress.finished(path)
    return _report(path, plan, total)


def _planned(tensor: SourceTensor, mix: Mix, source: Source, options: Options) -> _Planned:
    wanted = wanted_format(tensor.name, tensor.shape, mix, source.facts, pure=options.pure)
    if not is_quantized(tensor.name, tensor.shape) and not tensor.format.supported:
        return _Planned(tensor, tensor.format, tensor.format.name)     # integers stay integers
    chosen = BLOCKS[fallback(wanted, tensor.shape[-1])]
    check_target(tensor, chosen, options.requantize)
    return _Planned(tensor, chosen, wanted)


def _add_metadata(writer: GGUFWriter, metadata: Mapping[str, bytes], mix: Mix) -> None:
    ours = {"general.quantization_version": QUANTIZATION_VERSION,
            "general.file_type": mix.file_type}
    for key, value in metadata.items():
        if key in ours:
            writer.add(key, ours.pop(key))
        else:
            writer.add_packed(key, value)
    for key, number in ours.items():
        writer.add(key, number)


class _Counter:
    """Adds up what is done."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._done = progress, 0

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress.advance_to(self._done)


def _pieces(entry: _Planned, executor: Executor, n_threads: int, counter: _Counter
            ) -> Iterator[memoryview]:
    return encoded_pieces(entry.tensor, entry.format, executor, n_threads, counter.advance)


def _verify(path: Path, *, plan: list[_Planned], source: Source) -> None:
    """Read the complete file again: every key and every tensor is there, in order."""
    with open_gguf(path) as file:
        tensors = [(t.name, t.shape, t.format) for t in file.tensors.values()]
        planned = [(e.tensor.name, e.tensor.shape, e.format) for e in plan]
        if tensors != planned or not _holds(file, source.metadata):
            raise WriteError("the file that was written does not read back", where=path,
                             hint="check the disk")
        source.check(file)


def _holds(file: GGUFFile, metadata: Mapping[str, bytes]) -> bool:
    changed = {"general.quantization_version", "general.file_type"}
    return all(key in changed or file.packed_value(key) == value
               for key, value in metadata.items())


def _report(path: Path, plan: list[_Planned], nbytes_before: int) -> Report:
    fallen = Counter((e.wanted, e.format.name) for e in plan if e.wanted != e.format.name)
    return Report(
        path, sum(math.prod(e.tensor.shape) for e in plan), nbytes_before,
        sum(e.nbytes for e in plan), dict(fallen),
    )  # fmt: skip
