"""The pipeline: which passes run, in which order, and what they report."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ignis.errors import GraphError, UsageError
from ignis.graph.ir import Graph, verify
from ignis.graph.passes.common_subexpressions import common_subexpressions
from ignis.graph.passes.dead_code import dead_code
from ignis.graph.passes.fold_constants import fold_constants
from ignis.graph.passes.fuse_gate_up import fuse_gate_up
from ignis.graph.passes.fuse_geglu import fuse_geglu
from ignis.graph.passes.fuse_norm import fuse_norm
from ignis.graph.passes.fuse_qkv import fuse_qkv
from ignis.graph.passes.fuse_residual import fuse_residual
from ignis.graph.passes.fuse_swiglu import fuse_swiglu
from ignis.graph.passes.layout import layout
from ignis.graph.passes.legalize_activations import legalize_activations
from ignis.graph.passes.quantize_activations import quantize_activations
from ignis.graph.passes.rope_store import rope_store
from ignis.graph.passes.schedule_steps import schedule_steps


class Pass(NamedTuple):
    """A rewrite by its name on the command line. Required ones can't be switched off."""

    name: str
    function: Callable[[Graph], Graph]
    required: bool = False


class PassReport(NamedTuple):
    """What one pass did; `counts` says how many it made of each kind: {"rmsnorm": 49}."""

    name: str
    ops_before: int
    ops_after: int
    seconds: float
    counts: Mapping[str, int]


PIPELINE = (
    Pass("dead_code", dead_code),
    Pass("common_subexpressions", common_subexpressions),
    Pass("fold_constants", fold_constants),
    Pass("fuse_norm", fuse_norm),
    Pass("fuse_swiglu", fuse_swiglu),
    Pass("fuse_geglu", fuse_geglu),
    Pass("fuse_residual", fuse_residual),
    Pass("rope_store", rope_store),
    Pass("quantize_activations", quantize_activations),
    Pass("legalize_activations", legalize_activations, required=True),
    Pass("fuse_qkv", fuse_qkv),  # behind quantization: who reads the same form of x is known
    Pass("fuse_gate_up", fuse_gate_up),
    Pass("layout", layout),
    Pass("schedule_steps", schedule_steps),  # last: what changes the ops takes the barriers away
)

TOGGLES = (*(p.name for p in PIPELINE if not p.required), "plan_memory")
"""Names that may be switched off; without plan_memory every value has a buffer of its own."""


def run_pipeline(
    graph: Graph,
    disabled: Collection[str] = frozenset(),
    on_pass: Callable[[Pass, Graph], None] | None = None,
    *,
    check: bool = False,
) -> tuple[Graph, list[PassReport]]:
    """Run all passes but the `disabled` ones.

    Args:
        on_pass: called with each pass and the graph after it.
        check: verify the graph before and after every pass.

    Raises: UsageError for a name that is no pass or a required one; with `check`, GraphError
    naming the pass that broke a rule.
    """
    for name in sorted(set(disabled) - set(TOGGLES)):
        required = any(p.name == name for p in PIPELINE)
        what = "this pass can't be switched off" if required else "no such pass"
        raise UsageError(what, got=name, wanted=" or ".join(TOGGLES))
    if check:
        verify(graph)
    reports: list[PassReport] = []
    legalized = False
    for step in PIPELINE:
        if step.name in disabled:
            continue
        start = time.perf_counter()
        after = step.function(graph)
        seconds = time.perf_counter() - start
        legalized = legalized or step.name == "legalize_activations"
        if check:
            _verify_after(step, after, legalized)
        n_before, n_after = len(graph.operations), len(after.operations)
        counts = dict(after.tally - graph.tally)
        reports.append(PassReport(step.name, n_before, n_after, seconds, counts))
        graph = after
        if on_pass is not None:
            on_pass(step, graph)
    return graph, reports


def _verify_after(step: Pass, graph: Graph, legalized: bool) -> None:
    try:
        verify(graph, legalized=legalized)
    except GraphError as error:
        raise GraphError(f"after pass {step.name}: {error}") from None
