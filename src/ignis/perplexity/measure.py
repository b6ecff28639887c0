"""The whole run: windows through the model, positions through `rows`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ignis.api import Model
from ignis.errors import UsageError
from ignis.perplexity.estimate import (
    Divergence,
    Estimate,
    PerplexityResult,
    RunningPerplexity,
    Scores,
    as_scores,
    perplexity_of,
)
from ignis.perplexity.kl_base import (
    KLBase,
    RecordReader,
    pack_record,
    vocabulary_digest,
    writing_kl_base,
)
from ignis.perplexity.rows import Row, RowScore
from ignis.perplexity.windows import Windows

Progress = Callable[[int, int, Estimate], None]
"""Called after each window: windows done, windows in all, the perplexity so far."""


def measure_perplexity(
    model: Model, text: str | Windows | None = None, *, n_ctx: int | None = None,
    kl_base: KLBase | None = None, save_kl: Path | None = None,
    progress: Progress = lambda done, total, estimate: None,
) -> PerplexityResult:  # fmt: skip
    """Score a text in windows of `n_ctx` tokens (default: the base's, or the model's context).

    Args:
        text: None takes the base's.
        kl_base: what `open_kl_base` returned; the run is compared with it.
        save_kl: write the distributions of this run to that file.

    Raises: UsageError for a text that is too short or a base that does not fit; WriteError for a
        file that can't be written; NumericsError for logits that are no numbers.
    """
    windows = _windows(model, text, n_ctx, kl_base)
    if windows.n_ctx > model.n_ctx:
        raise UsageError(
            "windows are longer than the model's context", got=windows.n_ctx,
            wanted=f"at most {model.n_ctx}", hint="load it with a larger n_ctx",
        )  # fmt: skip
    vocabulary = b"" if kl_base is None and save_kl is None else vocabulary_digest(model.tokenizer)
    n_vocab = model.config.n_vocab
    if kl_base is not None:
        kl_base.check(windows, n_vocab, vocabulary)
    started = time.perf_counter()
    parts: list[Scores] = []
    running = RunningPerplexity()
    with ExitStack() as stack:
        saved = base = None
        if save_kl is not None:
            saved = stack.enter_context(writing_kl_base(save_kl, windows, n_vocab, vocabulary))
        if kl_base is not None:
            base = stack.enter_context(kl_base.records())
        pool = stack.enter_context(ThreadPoolExecutor(model.report.n_threads))
        for index in range(windows.n_windows):
            parts.append(as_scores(_score_window(model, windows, index, pool, base, saved)))
            progress(index + 1, windows.n_windows, running.add(parts[-1]))
    scores = np.concatenate(parts)
    return PerplexityResult(
        perplexity_of(scores), windows.n_ctx, windows.n_windows, len(scores),
        windows.n_windows * (windows.n_ctx - 1), time.perf_counter() - started,
        None if kl_base is None else Divergence.of(scores),
    )  # fmt: skip


def _windows(
    model: Model, text: str | Windows | None, n_ctx: int | None, base: KLBase | None
) -> Windows:
    if isinstance(text, Windows):
        return text
    if text is not None:
        default = model.n_ctx if base is None else base.windows.n_ctx
        return Windows.of_text(model.tokenizer, text, n_ctx or default)
    if base is None:
        raise UsageError("there is no text to score", hint="give one, or a base that holds one")
    return Windows(base.windows.ids, n_ctx or base.windows.n_ctx, base.windows.first_id)


def _score_window(
    model: Model, windows: Windows, index: int, pool: ThreadPoolExecutor,
    base: RecordReader | None, saved: BinaryIO | None,
) -> Iterator[RowScore]:  # fmt: skip
    """Feed a window to an empty sequence and score its second half, a few rows at a time."""
    ids, targets = windows.fed(index), windows.targets(index).tolist()
    sequence = model.new_sequence()
    sequence.feed(ids[: windows.n_unscored])
    done = 0
    for logits in sequence.feed_all(ids[windows.n_unscored :]):
        wanted = targets[done : done + len(logits)]
        done += len(logits)
        if base is not None:
            records = base.next(len(logits))
            yield from pool.map(_compared(base), logits, wanted, records)
        elif saved is not None:
            for score, record in pool.map(_recorded, logits, wanted):
                saved.write(record)
                yield score
        else:
            yield from pool.map(_scored, logits, wanted)


def _scored(logits: NDArray[np.float32], target: int) -> RowScore:
    return RowScore(Row.of(logits).log_prob(target))


def _recorded(logits: NDArray[np.float32], target: int) -> tuple[RowScore, bytes]:
    row = Row.of(logits)
    return RowScore(row.log_prob(target)), pack_record(row.record(target))


def _compared(base: RecordReader) -> Callable[[NDArray[np.float32], int, bytes], RowScore]:
    return lambda logits, target, record: Row.of(logits).score(target, base.parse(record))
