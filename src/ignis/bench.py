"""Measuring: prefill and decode of several engines, in alternating order, against the machine.

Engines take turns within each repetition, and the order turns round between repetitions, so that a
machine that gets slower or faster meanwhile does so for all of them. Reported are medians with the
smallest and largest value. Ceilings (memory bandwidth, multiply-adds) are measured on the spot.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ignis.errors import UsageError
from ignis.gguf import GGUFFile, open_gguf
from ignis.graph.ir.kv_types import DEFAULT_KV_TYPE
from ignis.graph.models import ModelConfig, build_graph
from ignis.runtime.ceilings import Ceilings
from ignis.runtime.work import StepSize, Work, step_work
from ignis.sampling import RandomStream

_SEED = 1       # of the prompt's ids: always the same


class TokenSequence(Protocol):
    """One sequence of tokens in an engine, with its KV cache."""

    def feed(self, ids: list[int]) -> npt.NDArray[np.float32]: ...
    def truncate(self, n_tokens: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several measurements, and how far they spread."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class BenchWork:
    """The work of a run: its prompt in one step, and the decode step in the middle."""

    prefill: Work
    decode: Work

    @classmethod
    def of(
        cls, file: GGUFFile, n_prompt: int, n_decode: int, kv_type: str = DEFAULT_KV_TYPE
    ) -> BenchWork:
        config = ModelConfig.from_gguf(file).for_context(n_prompt + n_decode, kv_type)
        graph = build_graph(config, file.tensors)
        return cls(step_work(graph, StepSize(n_prompt)),
                   step_work(graph, StepSize(1, n_prompt + n_decode // 2)))


@dataclass(frozen=True, slots=True)
class EngineResult:
    """One engine's figures. Rates are tokens per second."""

    engine: str
    n_prompt: int
    n_decode: int
    prefill: Spread
    decode: Spread
    compile_s: float            # from the file to an engine that can take a token
    first_token_s: float        # from a prompt's ids to the first token, median
    arena_bytes: int
    peak_memory_bytes: int      # of the process, up to the end of this engine's runs
    bandwidth_share: float | None
    arithmetic_share: float | None

    def as_json(self) -> dict[str, Any]:
        def phase(n_tokens: int, spread: Spread) -> dict[str, Any]:
            return {"tokens": n_tokens, "tok_s": round(spread.median, 3),
                    "min": round(spread.low, 3), "max": round(spread.high, 3)}

        return {"engine": self.engine, "prefill": phase(self.n_prompt, self.prefill),
                "decode": phase(self.n_decode, self.decode), "compile_s": round(self.compile_s, 4),
                "first_token_s": round(self.first_token_s, 4), "arena_bytes": self.arena_bytes,
                "peak_memory_bytes": self.peak_memory_bytes,
                "bandwidth_share": _rounded(self.bandwidth_share),
                "arithmetic_share": _rounded(self.arithmetic_share)}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure."""

    engines: tuple[str, ...] = ("graph", "imperative")
    n_prompt: int = 512
    n_decode: int = 128
    n_repeat: int = 5
    threads: int | None = None
    weights: str = "auto"
    kv_type: str = DEFAULT_KV_TYPE


def run_bench(
    path: Path, options: BenchOptions, ceilings: Ceilings | None
) -> list[EngineResult]:
    """Measure every engine of `options` on the model at `path`.

    `ceilings` None leaves the shares out. Raises `UsageError` for a context that is too short.
    """
    with open_gguf(path) as file:
        work = BenchWork.of(file, options.n_prompt, options.n_decode, options.kv_type)
        n_vocab = len(file.metadata["tokenizer.ggml.tokens"])   # type: ignore[arg-type]
        architecture = file.require("general.architecture", str)
        n_context = file.get(f"{architecture}.context_length", 0)
    wanted = options.n_prompt + options.n_decode
    if 0 < n_context < wanted:
        raise UsageError("more tokens than the model's context holds", where="bench", got=wanted,
                         wanted=f"at most {n_context}")
    prompt = prompt_ids(options.n_prompt, n_vocab)
    with ExitStack() as stack:
        runs = [stack.enter_context(_opened(path, engine, options)) for engine in options.engines]
        for turn in range(-1, options.n_repeat):    # turn -1 warms up and is not counted
            for run in runs if turn % 2 == 0 else reversed(runs):
                run.measure(prompt, options.n_decode, counted=turn >= 0)
        return [run.result(work, ceilings, options) for run in runs]


def prompt_ids(n_tokens: int, n_vocab: int) -> list[int]:
    """Ids from all over the vocabulary, the same in every run."""
    stream = RandomStream(_SEED)
    return [stream.next_word() % n_vocab for _ in range(n_tokens)]


class _Run:
    """One engine's model, sequence and measurements so far."""

    def __init__(self, engine: str, model: Any, compile_s: float) -> None:
        self.engine, self.model, self.compile_s = engine, model, compile_s
        self.sequence: TokenSequence = model.new_sequence()
        self.prefill_s: list[float] = []
        self.decode_s: list[float] = []
        self.peak_memory_bytes = 0

    def measure(self, prompt: list[int], n_decode: int, counted: bool) -> None:
        """Take the prompt, decode greedily, forget both."""
        begun = time.perf_counter()
        token = int(np.argmax(self.sequence.feed(prompt)))
        prefill_s = time.perf_counter() - begun
        begun = time.perf_counter()
        for _ in range(n_decode):
            token = int(np.argmax(self.sequence.feed([token])))
        decode_s = time.perf_counter() - begun
        self.sequence.truncate(0)
        if counted:
            self.prefill_s.append(prefill_s)
            self.decode_s.append(decode_s)
        self.peak_memory_bytes = peak_memory_bytes()

    def result(
        self, work: BenchWork, ceilings: Ceilings | None, options: BenchOptions
    ) -> EngineResult:
        prefill = Spread.of([options.n_prompt / s for s in self.prefill_s])
        decode = Spread.of([options.n_decode / s for s in self.decode_s])
        bandwidth = arithmetic = None
        if ceilings is not None:
            bandwidth = decode.median * work.decode.bandwidth_seconds(ceilings)
            ideal_s = work.prefill.arithmetic_seconds(ceilings)
            arithmetic = prefill.median / options.n_prompt * ideal_s
        return EngineResult(
            self.engine, options.n_prompt, options.n_decode, prefill, decode, self.compile_s,
            statistics.median(self.prefill_s), self.model.report.arena_nbytes,
            self.peak_memory_bytes, bandwidth, arithmetic)


@contextmanager
def _opened(path: Path, engine: str, options: BenchOptions) -> Iterator[_Run]:
    import ignis

    begun = time.perf_counter()
    n_ctx = options.n_prompt + options.n_decode
    with ignis.load(path, threads=options.threads, n_ctx=n_ctx, engine=engine,
                    weights=options.weights, kv_type=options.kv_type) as model:
        yield _Run(engine, model, time.perf_counter() - begun)


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far, mapped weights included."""
    with suppress(OSError, StopIteration):  # Linux; `ru_maxrss` begins at what the parent had
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def as_json(results: Sequence[EngineResult], ceilings: Ceilings | None) -> Mapping[str, Any]:
    """One engine: its figures at the top level; several: by name."""
    limits = None if ceilings is None else {
        "bandwidth_gb_s": round(ceilings.bandwidth_gb_s, 3),
        "int8_gmac_s": round(ceilings.int8_gmac_s, 3),
        "f32_gmac_s": round(ceilings.f32_gmac_s, 3)}
    if len(results) == 1:
        return {**results[0].as_json(), "ceilings": limits}
    return {"engines": {r.engine: r.as_json() for r in results}, "ceilings": limits}


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
