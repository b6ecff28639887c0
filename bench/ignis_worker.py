"""Ignis, served to `bench.compare`: `python -m bench.ignis_worker MODEL THREADS CONTEXT LAYOUT`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

import ignis
from bench.worker import SHORT_PROMPT, serve
from ignis.runtime.ceilings import measure
from ignis.runtime.engine import NativeEngine
from ignis.runtime.work import StepSize, step_work


class IgnisEngine:
    """A model in the graph engine. It measures the machine's ceilings, too."""

    def __init__(
        self, path: str, n_threads: int, n_ctx: int, layout: str, n_prompt: int, n_decode: int
    ) -> None:
        self._model = ignis.load(path, threads=n_threads, n_ctx=n_ctx, weights=layout)
        self._sequence = self._model.new_sequence()
        self._logits = np.empty(0, np.float32)
        self._sizes = {
            "prefill": StepSize(n_prompt),
            "decode": StepSize(1, SHORT_PROMPT + n_decode // 2),  # the step in the middle
        }
        self.n_threads, self.n_vocab = n_threads, self._model.config.n_vocab

    def about(self) -> dict[str, Any]:
        engine = self._model.engine
        assert isinstance(engine, NativeEngine)
        work = {name: asdict(step_work(engine.graph, size)) for name, size in self._sizes.items()}
        return {"version": f"ignis {ignis.__version__}", "layout": engine.weights.layout,
                "work": work}  # fmt: skip

    def ceilings(self) -> dict[str, float]:
        return asdict(measure(self.n_threads))

    def clear(self) -> None:
        self._sequence.truncate(0)

    def feed(self, ids: Sequence[int]) -> None:
        self._logits = self._sequence.feed(ids)

    def logits(self) -> bytes:
        return self._logits.astype("<f4").tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve Ignis to bench.compare.")
    parser.add_argument("model")
    parser.add_argument("n_threads", type=int)
    parser.add_argument("n_ctx", type=int)
    parser.add_argument("layout")
    parser.add_argument("n_prompt", type=int)
    parser.add_argument("n_decode", type=int)
    given = parser.parse_args()
    serve(lambda: IgnisEngine(given.model, given.n_threads, given.n_ctx, given.layout,
                              given.n_prompt, given.n_decode))


if __name__ == "__main__":
    main()
