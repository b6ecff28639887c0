"""Compile without running: what each stage of the compiler made, for people and for tests.

    compilation = inspect_model(file)
    compilation.passes[3].after            the graph behind a pass
    compilation.plan(1, 1).timetable       barriers of a decode step

Nothing is packed, no machine code is made and no thread started; addresses are zero.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import cast

from ignis.compile import configure, constant_of, without_layout
from ignis.gguf import GGUFFile
from ignis.graph.ir import Graph, verify
from ignis.graph.ir.kv_types import DEFAULT_KV_TYPE
from ignis.graph.models import ModelConfig, build_graph
from ignis.graph.passes import PassReport, run_pipeline
from ignis.graph.passes.plan_memory import MemoryPlan, plan_memory, verify_plan
from ignis.kernels.lang import Kernel
from ignis.runtime.kv_cache import KVCache
from ignis.runtime.launches import Launch, Surroundings, embedding_launch, lower
from ignis.runtime.schedule import Timetable, timetable_of, verify_schedule
from ignis.runtime.step import StepTables
from ignis.runtime.weights import packed_tensors

BUCKETS = ((1, 1), (16, 1), (16, 8), (128, 1), (128, 64), (512, 1), (512, 64))
"""Sizes (T, R) of the plans that are shown; the engine makes one when it first needs it."""


class _NoCache:
    """The KV cache of plans that are only looked at: every address and count is zero."""

    def base(self, layer: int) -> int:
        return 0

    def __getattr__(self, name: str) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class PassSnapshot:
    """One pass: its report, and the graph before and after it."""

    report: PassReport
    before: Graph
    after: Graph


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How a step of up to `n_tokens` tokens and `n_logits` rows of logits runs."""

    n_tokens: int
    n_logits: int
    launches: tuple[Launch, ...]
    timetable: Timetable
    memory: MemoryPlan
    seconds: float

    @property
    def scratch_nbytes(self) -> int:
        """What each thread needs while it runs a kernel, beside its private values."""
        return max((launch.scratch_nbytes for launch in self.launches), default=0)


@dataclass(frozen=True, slots=True)
class Compilation:
    """A model on its way through the compiler."""

    config: ModelConfig
    embedding: str  # the format of the embedding table
    naive: Graph
    passes: tuple[PassSnapshot, ...]
    verified: bool
    reuse: bool  # plan_memory is on
    seconds: float
    _plans: dict[tuple[int, int], StepPlan] = field(default_factory=dict, repr=False)

    @property
    def graph(self) -> Graph:
        """The graph behind all passes."""
        return self.passes[-1].after if self.passes else self.naive

    @property
    def layout(self) -> str:
        """Whether any weight is `packed`, or all are `mapped`."""
        return "packed" if packed_tensors(self.graph.weights.values()) else "mapped"

    def plan(self, n_tokens: int, n_logits: int) -> StepPlan:
        """The plan of steps of up to that size; verified if the compilation is."""
        key = n_tokens, n_logits
        if key not in self._plans:
            self._plans[key] = self._planned(*key)
        return self._plans[key]

    def kernels(self) -> Mapping[str, Kernel]:
        """All kernels that decoding and prompts need, by symbol."""
        launches = [*self.plan(1, 1).launches, *self.plan(16, 1).launches]
        return {launch.kernel.symbol: launch.kernel for launch in launches}

    def _planned(self, n_tokens: int, n_logits: int) -> StepPlan:
        started = time.perf_counter()
        memory = plan_memory(
            self.graph, n_tokens, n_logits, outputs_in_arena=False, reuse=self.reuse
        )
        launches = self._launches(n_tokens, n_logits)
        one = n_tokens == 1 and n_logits == 1
        timetable = timetable_of(self.graph, launches, one=one)
        seconds = time.perf_counter() - started
        if self.verified:
            verify_schedule(launches, timetable)
            verify_plan(memory)
        return StepPlan(n_tokens, n_logits, tuple(launches), timetable, memory, seconds)

    def _launches(self, n_tokens: int, n_logits: int) -> list[Launch]:
        at = Surroundings(
            n_tokens, n_logits, lambda value: 0, dict.fromkeys(self.graph.weights, 0),
            StepTables(1, 1),
            cast(KVCache, _NoCache()), lambda op: 0,
        )  # fmt: skip
        (x,) = self.graph.inputs
        first = embedding_launch(0, self.embedding, x, at)
        return [first, *(launch for op in self.graph.operations for launch in lower(op, at))]


def inspect_model(
    file: GGUFFile, *, disabled: Collection[str] = frozenset(), check: bool = False,
    weights: str = "packed", n_ctx: int | None = None, kv_type: str = DEFAULT_KV_TYPE,
) -> Compilation:
    """The compilation of a model file, for a context of `n_ctx` positions (default: as loading).

    `kv_type` is how the KV cache keeps keys and values.

    `weights` is "packed", "mapped" or, by the memory there is, "auto". `check` verifies the graph
    before and after every pass, and every plan and timetable.
    Raises: ModelFileError, UnsupportedModelError, UsageError; GraphError for a broken rule.
    """
    config, _ = configure(file, n_ctx, kv_type)
    started = time.perf_counter()
    naive = build_graph(config, file.tensors, lambda name: constant_of(file, name))
    seconds = time.perf_counter() - started
    embedding = file.tensors["token_embd.weight"].format.name
    off = frozenset(disabled) | without_layout(naive, weights)
    return inspect_graph(config, naive, embedding, disabled=off, check=check, seconds=seconds)


def inspect_graph(
    config: ModelConfig, naive: Graph, embedding: str, *,
    disabled: Collection[str] = frozenset(), check: bool = False, seconds: float = 0.0,
) -> Compilation:
    """The compilation of a graph that needs no file: `embedding` is the table's format."""
    snapshots: list[PassSnapshot] = []
    after: list[Graph] = []
    graph, reports = run_pipeline(
        naive, disabled, lambda step, graph: after.append(graph), check=check
    )
    for report, before, behind in zip(reports, [naive, *after], after, strict=False):
        snapshots.append(PassSnapshot(report, before, behind))
    verify(graph, legalized=True)
    reuse = "plan_memory" not in disabled
    return Compilation(config, embedding, naive, tuple(snapshots), check, reuse, seconds)
