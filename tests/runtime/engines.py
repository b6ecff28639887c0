"""Engines on small models, and ways to feed the same text to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.compile import compile_model
from ignis.gguf import open_gguf
from ignis.runtime.engine import MAX_LOGITS, Engine
from ignis.runtime.step import StepBatch
from ignis.settings import Settings

Logits = NDArray[np.float32]


@contextmanager
def engine(path: Path, cache_dir: Path, **options: Any) -> Iterator[Engine]:
    """An engine on the model at `path`; its objects are cached in `cache_dir`."""
    with open_gguf(path) as file:
        runner, _, _ = compile_model(file, Settings(cache_dir=cache_dir), **options)
        try:
            yield runner
        finally:
            runner.close()


def feed(
    runner: Engine, ids: Sequence[int], chunks: Sequence[int] | None = None, slot: int = 0
) -> Logits:
    """The logits of all positions, the text cut into steps of the given sizes."""
    runner.truncate(slot, 0)
    sizes = chunks or [min(MAX_LOGITS, len(ids) - i) for i in range(0, len(ids), MAX_LOGITS)]
    parts, start = [], 0
    for size in sizes:
        positions = range(start, start + size)
        batch = StepBatch(ids[start : start + size], [slot] * size, positions, range(size))
        parts.append(runner.forward(batch))
        start += size
    assert start == len(ids)
    return np.concatenate(parts)


def random_chunks(rng: np.random.Generator, total: int) -> list[int]:
    """Sizes of steps that add up to `total`."""
    sizes: list[int] = []
    while (left := total - sum(sizes)) > 0:
        sizes.append(int(rng.integers(1, min(left, 30) + 1)))
    return sizes


def mean_kl(reference: Logits, other: Logits) -> float:
    """Mean Kullback-Leibler divergence, in nats, of the rows' distributions; float64."""
    p, q = (_log_softmax(x.astype(np.float64)) for x in (reference, other))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def _log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = x - x.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
