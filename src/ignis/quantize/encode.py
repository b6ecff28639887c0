"""Rows in one format to rows in another, on all threads, in order, a chunk at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future

import numpy as np

from ignis.errors import NumericsError, UsageError
from ignis.gguf import BlockFormat
from ignis.quantize.source import SourceTensor

CHUNK_VALUES = 1 << 18
"""Values a thread encodes at a time: 1 MB as floats, and a fraction of a second of work."""

_WIDE = frozenset({"f32", "bf16", "mxfp4"})     # exponents as large as f32 has
_MAX_F16 = np.float32(65504)


def encoded_pieces(tensor: SourceTensor, target: BlockFormat, executor: Executor, n_threads: int,
                   advance: Callable[[int], None]) -> Iterator[memoryview]:
    """The bytes of a tensor in `target`, in pieces.

    `advance` is told the source's bytes that are done. At most two chunks a thread are held, so
    memory does not grow with the tensor. Raises NumericsError for a NaN, an infinity, or a
    number that the format cannot hold.
    """
    step = max(1, CHUNK_VALUES // tensor.shape[-1])
    row_nbytes = tensor.format.row_nbytes(tensor.shape[-1])
    waiting: deque[tuple[int, int, Future[memoryview]]] = deque()

    def first_piece() -> Iterator[memoryview]:
        start, stop, future = waiting.popleft()
        yield future.result()
        tensor.release(start, stop)     # a copied piece lies in the source until it is written
        advance((stop - start) * row_nbytes)

    try:
        for start in range(0, tensor.n_rows, step):
            stop = min(start + step, tensor.n_rows)
            future = executor.submit(_encode, tensor, target, start, stop)
            waiting.append((start, stop, future))
            if len(waiting) >= 2 * n_threads:
                yield from first_piece()
        while waiting:
            yield from first_piece()
    finally:
        for _, _, future in waiting:
            future.cancel()


def check_target(tensor: SourceTensor, target: BlockFormat, requantize: bool) -> None:
    """Raise UsageError for a tensor that cannot be turned into `target`, or had better not be."""
    if tensor.format is target:
        return
    if not tensor.format.supported:
        raise UsageError(f"tensor '{tensor.name}' cannot be decoded", got=tensor.format.name,
                         hint="take the model in another quantization, best in F16 or BF16")
    if not target.encodable:
        raise UsageError(f"no encoder for {target.name}, which '{tensor.name}' would become")
    if tensor.format.name not in ("f32", "f16", "bf16", "q8_0") and not requantize:
        raise UsageError(
            f"tensor '{tensor.name}' is quantized already", got=tensor.format.name,
            wanted="f32, f16, bf16 or q8_0",
            hint="take the model in F16 or BF16, or pass --requantize and lose quality twice")


def _encode(tensor: SourceTensor, target: BlockFormat, start: int, stop: int) -> memoryview:
    rows = tensor.read(start, stop)
    if tensor.format is not target:
        values = tensor.format.decode(rows)
        _check_values(values, tensor, target)
        rows = target.encode(values)
    return np.ascontiguousarray(rows).reshape(-1).data


def _check_values(values: np.ndarray, tensor: SourceTensor, target: BlockFormat) -> None:
    # One pass, and NaN passes through both: largest of all magnitudes.
    largest = max(values.max(), -values.min())
    if not np.isfinite(largest):
        raise NumericsError(f"tensor '{tensor.name}' cannot be quantized", got=largest,
                            wanted="finite weights")
    if target.name not in _WIDE and largest > _MAX_F16:
        raise NumericsError(f"tensor '{tensor.name}' cannot be stored as {target.name}",
                            got=largest, wanted=f"at most {_MAX_F16:.0f}",
                            hint="--type bf16 or f32 holds it")
