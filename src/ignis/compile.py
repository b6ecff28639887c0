"""The whole pipeline on one page: an open GGUF file in, an engine that runs it out.

    ModelConfig.from_gguf   metadata -> the numbers that shape the model
    build_graph             tensors  -> the naive graph, every tensor checked
    run_pipeline            passes rewrite the graph, each by name
    plan_memory             every activation gets an offset in one arena   (per step size)
    lower                   ops -> kernel launches                         (per step size)
    Library                 kernels -> machine code for this processor, or from the object cache
    ThreadTeam              threads that walk the compiled plan
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from ignis.errors import GraphError, UsageError
from ignis.gguf import GGUFFile
from ignis.graph.ir import Graph, verify
from ignis.graph.ir.kv_types import DEFAULT_KV_TYPE, check_kv_type
from ignis.graph.models import ModelConfig, build_graph
from ignis.graph.passes import PassReport, run_pipeline
from ignis.graph.passes.layout import packed_weights
from ignis.graph.passes.pipeline import TOGGLES, Pass
from ignis.native.cache import ObjectCache
from ignis.native.host import running_target
from ignis.native.library import BuildReport
from ignis.runtime.engine import (
    Engine,
    EngineOptions,
    ImperativeEngine,
    NativeEngine,
    ReferenceEngine,
)
from ignis.runtime.threads import available_threads
from ignis.runtime.weights import choose_layout, packed_tensors
from ignis.settings import Settings
from ignis.target import Target

ENGINES = ("graph", "imperative", "reference")
DEFAULT_CTX = 4096  # positions, unless the model or the caller wants fewer or more


class CompileReport(NamedTuple):
    """What the compiler did, for people and for tests. Sizes in bytes, of a decode step."""

    architecture: str
    n_layers: int
    n_vocab: int
    ops_before: int
    ops_after: int
    passes: tuple[PassReport, ...]
    n_values: int
    n_buffers: int
    naive_nbytes: int
    arena_nbytes: int
    output_nbytes: int
    layout: str
    n_threads: int
    n_kernels: int
    n_compiled: int
    build_seconds: float
    seconds: float

    def lines(self) -> list[str]:
        """The report as `ignis run` prints it."""
        labels = {"rmsnorm": "rmsnorm", "swiglu": "swiglu", "matmul+residual": "residual"}
        counts: Counter[str] = Counter()
        for report in self.passes:
            for kind, label in labels.items():
                if kind in report.counts:
                    counts[label] += report.counts[kind]
        made = " + ".join(f"{count} {label}" for label, count in counts.items()) or "nothing"
        quantized = sum(report.counts.get("quantize", 0) for report in self.passes)
        extra = f", {quantized} quantize placed" if quantized else ""
        used = self.arena_nbytes + self.output_nbytes
        saved = 100 * (1 - used / self.naive_nbytes)
        return [
            f"loaded {self.architecture} ({self.n_layers} layers, vocab {self.n_vocab}) "
            f"in {self.seconds:.2f}s",
            f"compiler: {self.ops_before} ops -> {self.ops_after - quantized} ops "
            f"({made} fused{extra})",
            f"compiler: {self.n_values} activation values -> {self.n_buffers} reused buffers "
            f"({self.naive_nbytes / 1024:.1f} KB -> {used / 1024:.1f} KB activations, "
            f"{saved:.0f}% saved)",
            f"compiler: {self.n_kernels} kernels, {self.n_compiled} compiled, the others from "
            f"the cache ({self.build_seconds:.2f}s); weights {self.layout}, "
            f"{self.n_threads} threads",
        ]


def compile_model(
    file: GGUFFile,
    settings: Settings,
    *,
    engine: str = "graph",
    n_threads: int | None = None,
    n_ctx: int | None = None,
    n_slots: int = 1,
    weights: str = "auto",
    kv_type: str = DEFAULT_KV_TYPE,
    disabled_passes: Collection[str] = frozenset(),
    target: Target | None = None,
    on_pass: Callable[[Pass, Graph], None] | None = None,
) -> tuple[Engine, ModelConfig, CompileReport]:
    """Compile the model in `file` for `target` (default: the settings', then this processor).

    Raises: ModelFileError, UnsupportedModelError for the file; UsageError for the options.
    """
    started = time.perf_counter()
    if engine not in ENGINES:
        raise UsageError("no such engine", got=engine, wanted=" or ".join(ENGINES))
    config, n_ctx = configure(file, n_ctx, kv_type)
    naive = build_graph(config, file.tensors, lambda name: constant_of(file, name))
    n_threads = _thread_count(n_threads, settings)
    runner: Engine
    passes: list[PassReport] = []
    if engine == "reference":
        graph, weights, built = naive, "float64", BuildReport(0, 0, 0.0)
        runner = ReferenceEngine(file, naive, n_ctx, n_slots)
        n_values = n_buffers = len(naive.values)
        naive_nbytes = arena = naive.activation_nbytes(1, 1)
        output = 0
    else:
        # The imperative engine runs what the model says op by op.
        unwanted = set(TOGGLES) - {"layout"} if engine == "imperative" else set(disabled_passes)
        disabled = unwanted | without_layout(naive, weights)
        graph, passes = run_pipeline(naive, disabled, on_pass)
        verify(graph, legalized=True)
        options = EngineOptions(
            n_threads, n_ctx, n_slots, target or running_target(settings.target),
            ObjectCache(settings.objects_dir), "plan_memory" not in disabled,
        )  # fmt: skip
        kind = NativeEngine if engine == "graph" else ImperativeEngine
        runner = kind(file, config, graph, options)
        plan, weights, built = runner.plan(1, 1), runner.weights.layout, runner.library.report
        n_values, n_buffers = plan.n_values, plan.n_buffers
        naive_nbytes, arena, output = plan.naive_nbytes, plan.nbytes, plan.output_nbytes
    report = CompileReport(
        config.architecture, config.n_layers, config.n_vocab, len(naive.operations),
        len(graph.operations), tuple(passes), n_values, n_buffers, naive_nbytes, arena, output,
        weights, n_threads, built.n_kernels, built.n_compiled, built.seconds,
        time.perf_counter() - started,
    )  # fmt: skip
    return runner, config, report


def configure(
    file: GGUFFile, n_ctx: int | None, kv_type: str = DEFAULT_KV_TYPE
) -> tuple[ModelConfig, int]:
    """The model's numbers for a context of `n_ctx` positions, and that context's size.

    Raises: UsageError for a context that the model was not trained for, and for a type of KV cache
    that is unknown or does not fit its heads.
    """
    config = ModelConfig.from_gguf(file)
    n_ctx = _context(config, n_ctx)
    try:
        check_kv_type(kv_type, config.head_dim, file.path)
    except GraphError as error:
        raise UsageError(str(error)) from None
    return config.for_context(n_ctx, kv_type), n_ctx


def without_layout(naive: Graph, weights: str) -> frozenset[str]:
    """The pass that `--weights` switches off, if it does: with `auto`, where memory is short."""
    tensors = packed_tensors(packed_weights(naive).values()) if weights == "auto" else []
    chosen = choose_layout(weights, tensors)
    return frozenset({"layout"} if chosen == "mapped" else ())


def constant_of(file: GGUFFile, name: str) -> float | None:
    """The number that all elements of an f32 vector are, or None where they differ."""
    array = file.array(name)
    first = float(array[0])
    bits = array.view("u4")
    return first if math.isfinite(first) and bool((bits == bits[0]).all()) else None


def _context(config: ModelConfig, wanted: int | None) -> int:
    """Positions of the context: what the caller wants, within what the model was trained for."""
    if wanted is None:
        return min(config.n_ctx_train, DEFAULT_CTX)
    if not 1 <= wanted <= config.n_ctx_train:
        raise UsageError("the context can't have this size", got=wanted,
                         wanted=f"1 to {config.n_ctx_train}, which the model was trained for",
                         hint="choose a smaller --ctx")  # fmt: skip
    return wanted


def _thread_count(wanted: int | None, settings: Settings) -> int:
    if wanted is not None and wanted < 1:
        raise UsageError("the number of threads makes no sense", got=wanted, wanted="1 or more")
    return wanted or settings.threads or available_threads()
