"""Differential testing: random graphs, compiled in random ways, agree with float64 and by bits.

What would be broken: a pass, a schedule, a plan or a kernel that is wrong for a graph that no model
at hand has. `python -m tests.fuzz_graphs --count 20000` runs more of the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ignis.graph.ir import Graph, Operation, parse_graph
from ignis.graph.ir.ops import Swiglu
from ignis.graph.passes import Pass, pipeline
from tests import fuzz_graphs
from tests.compiler.graph_runner import Zoned
from tests.compiler.random_graphs import random_case
from tests.fuzz_graphs import failure_of, report, shrink


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


@pytest.mark.parametrize("part", range(20))
def test_random_graphs(objects: Path, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 graphs. Code for older processors is made for the first hundred only: it is slow to
    compile, and the command line runs them all."""
    if part >= 4:
        monkeypatch.setattr(fuzz_graphs, "levels", lambda: ["host"])
    for seed in range(25 * part, 25 * (part + 1)):
        if (failure := failure_of(random_case(seed), objects, n_settings=2)) is not None:
            pytest.fail(report(random_case(seed), objects, failure))


def test_cases_are_the_same_everywhere() -> None:
    first, second = random_case(7), random_case(7)
    assert first.graph == second.graph and first.tokens == second.tokens
    assert all(np.array_equal(first.weights[n], second.weights[n]) for n in first.weights)
    kinds = {op.name for seed in range(150) for op in random_case(seed).graph.operations}
    assert {"rope_store", "attend", "matmul_group", "quantize", "logits", "rope"} <= kinds
    sizes = {len(random_case(seed).graph.operations) for seed in range(150)}
    assert min(sizes) == 1 and max(sizes) >= 20


def _swapped(graph: Graph) -> Graph:
    """A pass with a bug: it takes gate for up."""

    def swap(op: Operation) -> Operation:
        return op.with_operands(gate=op.up, up=op.gate) if isinstance(op, Swiglu) else op

    return graph.with_operations([swap(op) for op in graph.operations])


def test_a_wrong_pass_is_found_and_its_graph_shrunk(
    objects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise five hundred passing graphs prove nothing."""
    monkeypatch.setattr(fuzz_graphs, "levels", lambda: ["host"])
    monkeypatch.setattr(pipeline, "PIPELINE", (*pipeline.PIPELINE, Pass("fuse_swapped", _swapped)))
    monkeypatch.setattr(pipeline, "TOGGLES", (*pipeline.TOGGLES, "fuse_swapped"))
    monkeypatch.setattr(fuzz_graphs, "PLAIN", fuzz_graphs.Setting(
        disabled=pipeline.TOGGLES, plain=True))  # fmt: skip
    seed = next(s for s in range(200) if failure_of(random_case(s), objects, 2))
    small = shrink(random_case(seed), lambda c: failure_of(c, objects, 2) is not None)
    assert len(small.graph.operations) <= 3
    assert any(op.name in ("swiglu", "mul") for op in small.graph.operations)
    assert len(small.tokens) == 1
    failure = failure_of(small, objects)
    assert failure is not None
    text = report(small, objects, failure)
    assert f"python -m tests.fuzz_graphs --seed {seed}" in text
    parse_graph(text[text.index("graph(") : text.index("\n}") + 3])


def test_red_zones_see_writes_beside_a_buffer() -> None:
    zoned = Zoned(100)
    assert np.isnan(zoned.floats(1, 25)).all()
    zoned.bytes[:] = 7
    zoned.check("x")
    zoned._memory.bytes[256 + 100] = 7
    with pytest.raises(AssertionError, match="x: written behind"):
        zoned.check("x")
