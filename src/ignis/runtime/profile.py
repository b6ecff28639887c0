"""Where the time of a step goes: each launch timed natively, grouped by what it computes.

The walker adds up cycles a record on thread 0, at work and at the barrier behind it. Waiting for
the other threads makes a group of its own: it says how evenly the work was divided.

Cycles become seconds by the clock: a run as the caller sees it takes a little longer than the
cycles inside, so the smallest ratio of the two over all runs is the length of a cycle.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ignis.errors import UsageError
from ignis.graph.ir import Operation
from ignis.runtime.engine import MAX_TOKENS, NativeEngine
from ignis.runtime.launches import Launch
from ignis.runtime.step import StepBatch
from ignis.runtime.work import StepSize, Work, operation_work

_SLOT = 0


@dataclass(slots=True)
class StepGroup:
    """Launches of the same kernel and purpose, summed over the layers of one step."""

    label: str
    kernel: str
    n_launches: int = 0
    seconds: float = 0.0
    work: Work = field(default_factory=Work)


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """One launch: seconds at work, and at the barrier behind it (0 where there is none)."""

    launch: Launch
    seconds: float
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class PhaseProfile:
    """One phase: a step of `size`; medians of `n_runs` runs, in order and in groups by time."""

    name: str
    size: StepSize
    n_runs: int
    launches: tuple[LaunchTime, ...]
    groups: tuple[StepGroup, ...]

    @property
    def seconds(self) -> float:
        """A whole step, without what Python does around it."""
        return sum(group.seconds for group in self.groups)

    @property
    def work(self) -> Work:
        return sum((group.work for group in self.groups), Work())


def profile_engine(
    engine: NativeEngine, n_tokens: int = 512, n_runs: int = 5, n_decode_runs: int = 64
) -> list[PhaseProfile]:
    """Profile prefill of `n_tokens` tokens, and the decode step behind them.

    Clears the engine's first slot. Raises UsageError for more tokens than a step or the context
    takes, and where there is no cycle counter.
    """
    if not 1 <= n_tokens <= MAX_TOKENS:
        raise UsageError("a step does not take so many tokens", where="profile", got=n_tokens,
                         wanted=f"1 to {MAX_TOKENS}")  # fmt: skip
    if n_tokens + 1 > engine.n_ctx:
        raise UsageError("more tokens than the context holds", where="profile",
                         got=n_tokens + 1, wanted=f"at most {engine.n_ctx}")  # fmt: skip
    recorder = _Recorder(engine)
    prefill, decode = StepSize(n_tokens), StepSize(1, n_tokens)
    engine.truncate(_SLOT, 0)
    recorder.run(prefill)  # makes the plan, touches memory: not counted
    prefill_runs = [recorder.run(prefill) for _ in range(n_runs)]
    engine.forward(_batch(prefill, engine.config.n_vocab))
    recorder.run(decode)
    decode_runs = [recorder.run(decode) for _ in range(n_decode_runs)]
    engine.truncate(_SLOT, 0)
    phases = []
    for name, size, runs in (("prefill", prefill, prefill_runs), ("decode", decode, decode_runs)):
        launches = _medians(runs, recorder.seconds_a_cycle)
        groups = tuple(_grouped(launches, size))
        phases.append(PhaseProfile(name, size, len(runs), launches, groups))
    return phases


@dataclass(frozen=True, slots=True)
class _Run:
    launches: Sequence[Launch]
    cycles: NDArray[np.int64]  # [launch][2]: at work, at the barrier behind


class _Recorder:
    """Runs profiled steps and keeps the best estimate of a cycle's length."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self.seconds_a_cycle = float("inf")

    def run(self, size: StepSize) -> _Run:
        """Profile a step; the engine does not advance, so it may be repeated."""
        batch = _batch(size, self._engine.config.n_vocab)
        started = time.perf_counter()
        timed = self._engine.profile(batch)
        seconds = time.perf_counter() - started
        cycles = np.array([(work, wait) for _, work, wait in timed], np.int64)
        if cycles.sum() == 0:
            raise UsageError("no cycle counter on this processor", where="profile",
                             wanted="an x86-64 processor")  # fmt: skip
        self.seconds_a_cycle = min(self.seconds_a_cycle, seconds / float(cycles.sum()))
        return _Run([launch for launch, _, _ in timed], cycles)


def _batch(size: StepSize, n_vocab: int) -> StepBatch:
    """Tokens from all over the vocabulary, the same in every run; logits of the last."""
    positions = range(size.n_past, size.n_past + size.n_tokens)
    ids = [(position * 7919 + 13) % n_vocab for position in positions]
    return StepBatch(ids, [_SLOT] * size.n_tokens, positions, [size.n_tokens - 1])


def _medians(runs: Sequence[_Run], seconds_a_cycle: float) -> tuple[LaunchTime, ...]:
    """Each launch's median over the runs."""
    seconds = np.median(np.stack([run.cycles for run in runs]), axis=0) * seconds_a_cycle
    return tuple(
        LaunchTime(launch, work, wait)
        for launch, (work, wait) in zip(runs[0].launches, seconds.tolist(), strict=True)
    )


def _grouped(launches: Sequence[LaunchTime], size: StepSize) -> Iterable[StepGroup]:
    """Groups by descending time."""
    groups: dict[tuple[str, str], StepGroup] = {}
    waiting = StepGroup("barriers", "")
    for timed in launches:
        launch = timed.launch
        waiting.n_launches += timed.wait_seconds > 0
        waiting.seconds += timed.wait_seconds
        key = (launch_label(launch), launch.kernel.name)
        group = groups.setdefault(key, StepGroup(*key))
        group.n_launches += 1
        group.seconds += timed.seconds
        group.work += launch_work(launch, size)
    if waiting.n_launches:
        groups["barriers", ""] = waiting
    return sorted(groups.values(), key=lambda group: -group.seconds)


def launch_work(launch: Launch, size: StepSize) -> Work:
    """Of an op's launches, the one that first writes its result has all the work."""
    op = launch.computes
    if op is None or not (launch.writes - launch.reads).intersection(op.results):
        return Work()
    return operation_work(op, size)


def launch_label(launch: Launch) -> str:
    """The op and its weights without layer and suffix: `matmul attn_q`."""
    op = launch.computes
    if op is None:
        return "embed"
    names = [_role(value.name) for value in op.operands if value.is_weight]
    matrices = [name for name in names if not name.endswith(".bias")]
    return " ".join([_op_name(op), "+".join(matrices)]).strip()


def _op_name(op: Operation) -> str:
    return op.kind.replace("matmul+residual", "matmul")


def _role(tensor: str) -> str:
    """`blk.7.attn_q.weight` -> `attn_q`."""
    parts = tensor.removesuffix(".weight").split(".")
    return ".".join(parts[2:] if parts[0] == "blk" else parts)
