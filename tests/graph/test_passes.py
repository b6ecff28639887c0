"""Passes on small textual graphs: what they rewrite, what they leave alone, that meaning stays."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from ignis.errors import GraphError, UsageError
from ignis.graph import passes
from ignis.graph.ir import Graph, parse_graph, print_graph, verify
from ignis.graph.ir.interpreter import ReferenceCache, interpret
from ignis.graph.passes import PIPELINE, TOGGLES, Pass, pipeline, run_pipeline
from ignis.graph.passes.fuse_norm import fuse_norm
from ignis.graph.passes.fuse_swiglu import fuse_swiglu
from tests.graph.qwen_shape import qwen2_graph

PASS_BY_NAME = {p.name: p for p in PIPELINE}

HEADER = """\
graph(%x: f32[T,64], %y: f32[T,64]) {
  weights {
    @gain: f32[64]
    @f: f16[64,64]
    @g: bf16[64,64]
    @q: q4_0[64,64]
    @k: q8_0[64,64]
    @bias: f32[64]
    @ones: f32[64] = 1.0
    @zeros: f32[64] = 0.0
    @minus: f32[64] = -0.0
    @turns: f32[16] = 1.0
  }
"""
ATTEND = "{layer = 0, n_heads = 2, n_kv_heads = 2, head_dim = 32, scale = 0.5}"


def _graph(*lines: str, header: str = HEADER) -> Graph:
    """Lines without their type, which is f32[T,64] unless given; unused weights are left out."""
    complete = ("return", "barrier", "then")
    body = [line if " : " in line or line.startswith(complete) else f"{line} : f32[T,64]"
            for line in lines]  # fmt: skip
    used = "\n".join(body)
    kept = [
        line
        for line in header.splitlines()
        if not line.strip().startswith("@")
        or any(line.split(":")[0].strip() + end in used for end in ",)")
    ]
    if kept[-2].strip() == "weights {":
        del kept[-2:]
    return parse_graph("\n".join([*kept, *body, "}"]))


ROPE = '{style = "neox", head_dim = 32, n_rot = 32, base = 10000.0}'
STORE = '{layer = 0, style = "neox", head_dim = 32, n_rot = 32, base = 10000.0}'
SQUARE = "f32[T,64]"


CASES: dict[str, list[tuple[str, list[str], list[str] | None]]] = {
    "dead_code": [
        (
            "an unused chain goes",
            ["%0 = silu(%x)", "%1 = mul(%0, %0)", "%2 = add(%x, %y)", "return %2"],
            ["%2 = add(%x, %y)", "return %2"],
        ),
        (
            "an effect stays, and what it needs",
            ["%0 = silu(%x)", f"%1 = attention(%0, %x, %y) {ATTEND}", "%2 = silu(%y)", "return %2"],
            None,
        ),
    ],
    "common_subexpressions": [
        (
            "a chain, operands of sums in either order",
            ["%0 = silu(%x)", "%1 = silu(%x)", "%2 = add(%0, %y)", "%3 = add(%y, %1)",
             "%4 = mul(%2, %3)", "return %4"],
            ["%0 = silu(%x)", "%2 = add(%0, %y)", "%4 = mul(%2, %2)", "return %4"],
        ),
        (
            "an output takes the first one's name",
            ["%0 = silu(%x)", "%1 = silu(%x)", "return %1, %0"],
            ["%0 = silu(%x)", "return %0, %0"],
        ),
        ("other operands, other order: no",
         ["%0 = swiglu(%x, %y)", "%1 = swiglu(%y, %x)", "%2 = add(%0, %1)", "return %2"], None),
        ("other attributes: no",
         ["%0 = normalize(%x) {eps = 1e-06}", "%1 = normalize(%x) {eps = 1e-05}",
          "%2 = add(%0, %1)", "return %2"], None),
        (
            "effects stay",
            [f"%0 = attention(%x, %x, %y) {ATTEND}",
             f"%1 = attention(%x, %x, %y) {ATTEND.replace('layer = 0', 'layer = 1')}",
             "%2 = add(%0, %1)", "return %2"],
            None,
        ),
    ],
    "fold_constants": [
        (
            "a gain of ones, alone and fused",
            ["%0 = scale(%x, @ones)", "%1 = rmsnorm(%0, @ones) {eps = 1e-06}", "return %1"],
            ["%1 = normalize(%x) {eps = 1e-06}", "return %1"],
        ),
        ("an output", ["%0 = scale(%x, @ones)", "return %0"], ["return %x"]),
        (
            "rope factors of ones",
            [f"%0 = rope(%x, factors=@turns) {ROPE}", "return %0"],
            [f"%0 = rope(%x) {ROPE}", "return %0"],
        ),
        (
            "a bias of -0",
            ["%0 = matmul(%x, @f, bias=@minus)", "return %0"],
            ["%0 = matmul(%x, @f)", "return %0"],
        ),
        ("a bias of +0 turns -0 into +0: no", ["%0 = matmul(%x, @f, bias=@zeros)", "return %0"],
         None),
        ("unknown numbers: no", ["%0 = scale(%x, @gain)", "return %0"], None),
    ],
    "rope_store": [
        (
            "q and k turned alike",
            [f"%0 = rope(%x) {ROPE}", f"%1 = rope(%y) {ROPE}",
             f"%2 = attention(%0, %1, %y) {ATTEND}", "return %2"],
            [f"%0 = rope_store(%x, %y, %y) {STORE}", f"%2 = attend(%0) {ATTEND}", "return %2"],
        ),
        (
            "with factors",
            [f"%0 = rope(%x, factors=@turns) {ROPE}", f"%1 = rope(%y, factors=@turns) {ROPE}",
             f"%2 = attention(%0, %1, %y) {ATTEND}", "return %2"],
            [f"%0 = rope_store(%x, %y, %y, factors=@turns) {STORE}",
             f"%2 = attend(%0) {ATTEND}", "return %2"],
        ),
        ("only q: no", [f"%0 = rope(%x) {ROPE}", f"%1 = attention(%0, %x, %y) {ATTEND}",
                        "return %1"], None),
        (
            "turned differently: no",
            [f"%0 = rope(%x) {ROPE}", f"%1 = rope(%y) {ROPE.replace('neox', 'interleaved')}",
             f"%2 = attention(%0, %1, %y) {ATTEND}", "return %2"],
            None,
        ),
        (
            "the turned key is read again: no",
            [f"%0 = rope(%x) {ROPE}", f"%1 = rope(%y) {ROPE}",
             f"%2 = attention(%0, %1, %1) {ATTEND}", "return %2"],
            None,
        ),
    ],
    "fuse_qkv": [
        (
            "three, through rope and without",
            ["%0 = matmul(%x, @f, bias=@bias)", f"%1 = rope(%0) {ROPE}", "%2 = matmul(%x, @g)",
             "%3 = matmul(%x, @f)", f"%4 = attention(%1, %2, %3) {ATTEND}", "return %4"],
            [f"%0, %2, %3 = matmul_group(%x, @f, @g, weight2=@f, bias0=@bias) : "
             f"{SQUARE}, {SQUARE}, {SQUARE}", f"%1 = rope(%0) {ROPE}",
             f"%4 = attention(%1, %2, %3) {ATTEND}", "return %4"],
        ),
        (
            "in front of a rope_store; v reads another value",
            ["%0 = matmul(%x, @f)", "%1 = matmul(%x, @g, bias=@bias)", "%2 = matmul(%y, @f)",
             f"%3 = rope_store(%0, %1, %2) {STORE}", f"%4 = attend(%3) {ATTEND}", "return %4"],
            [f"%0, %1 = matmul_group(%x, @f, @g, bias1=@bias) : {SQUARE}, {SQUARE}",
             "%2 = matmul(%y, @f)", f"%3 = rope_store(%0, %1, %2) {STORE}",
             f"%4 = attend(%3) {ATTEND}", "return %4"],
        ),
        (
            "block-quantized and float weights read x in different forms",
            ["%0 = matmul(%x, @f)", "%1 = matmul(%x, @q)", "%2 = matmul(%x, @k)",
             f"%3 = attention(%0, %1, %2) {ATTEND}", "return %3"],
            ["%0 = matmul(%x, @f)", f"%1, %2 = matmul_group(%x, @q, @k) : {SQUARE}, {SQUARE}",
             f"%3 = attention(%0, %1, %2) {ATTEND}", "return %3"],
        ),
        ("one matmul in all three roles: no",
         ["%0 = matmul(%x, @f)", f"%1 = attention(%0, %0, %0) {ATTEND}", "return %1"], None),
        ("with a residual: no",
         ["%0 = matmul(%x, @f)", "%1 = matmul(%x, @g, residual=%0)",
          f"%2 = attention(%0, %1, %y) {ATTEND}", "return %2"], None),
        ("no attention: no", ["%0 = matmul(%x, @f)", "%1 = matmul(%x, @g)", "%2 = add(%0, %1)",
                              "return %2"], None),
    ],
    "fuse_gate_up": [
        (
            "behind a swiglu",
            ["%0 = matmul(%x, @f)", "%1 = matmul(%x, @g)", "%2 = swiglu(%0, %1)", "return %2"],
            [f"%0, %1 = matmul_group(%x, @f, @g) : {SQUARE}, {SQUARE}", "%2 = swiglu(%0, %1)",
             "return %2"],
        ),
        (
            "behind silu and mul, up first",
            ["%0 = matmul(%x, @f)", "%1 = silu(%0)", "%2 = matmul(%x, @g)", "%3 = mul(%2, %1)",
             "return %3"],
            [f"%2, %0 = matmul_group(%x, @g, @f) : {SQUARE}, {SQUARE}", "%1 = silu(%0)",
             "%3 = mul(%2, %1)", "return %3"],
        ),
        ("other inputs: no", ["%0 = matmul(%x, @f)", "%1 = matmul(%y, @g)",
                              "%2 = swiglu(%0, %1)", "return %2"], None),
        ("one matmul twice: no", ["%0 = matmul(%x, @f)", "%2 = swiglu(%0, %0)", "return %2"], None),
    ],
    "fuse_norm": [
        (
            "a pair",
            ["%0 = normalize(%x) {eps = 1e-06}", "%1 = scale(%0, @gain)", "return %1"],
            ["%1 = rmsnorm(%x, @gain) {eps = 1e-06}", "return %1"],
        ),
        (
            "read twice: no",
            ["%0 = normalize(%x) {eps = 1e-06}", "%1 = scale(%0, @gain)", "%2 = add(%0, %1)",
             "return %2"],
            None,
        ),
        (
            "also an output: no",
            ["%0 = normalize(%x) {eps = 1e-06}", "%1 = scale(%0, @gain)", "return %0, %1"],
            None,
        ),
        ("scale alone: no", ["%1 = scale(%x, @gain)", "return %1"], None),
    ],
    "fuse_swiglu": [
        (
            "gate first",
            ["%0 = silu(%x)", "%1 = mul(%0, %y)", "return %1"],
            ["%1 = swiglu(%x, %y)", "return %1"],
        ),
        (
            "gate second",
            ["%0 = silu(%x)", "%1 = mul(%y, %0)", "return %1"],
            ["%1 = swiglu(%x, %y)", "return %1"],
        ),
        ("squared: no", ["%0 = silu(%x)", "%1 = mul(%0, %0)", "return %1"], None),
        (
            "both are silus: the first",
            ["%0 = silu(%x)", "%1 = silu(%y)", "%2 = mul(%0, %1)", "return %2"],
            ["%1 = silu(%y)", "%2 = swiglu(%x, %1)", "return %2"],
        ),
    ],
    "fuse_geglu": [
        (
            "gate first",
            ["%0 = gelu(%x)", "%1 = mul(%0, %y)", "return %1"],
            ["%1 = geglu(%x, %y)", "return %1"],
        ),
        (
            "gate second",
            ["%0 = gelu(%x)", "%1 = mul(%y, %0)", "return %1"],
            ["%1 = geglu(%x, %y)", "return %1"],
        ),
        ("a silu: no", ["%0 = silu(%x)", "%1 = mul(%0, %y)", "return %1"], None),
        ("squared: no", ["%0 = gelu(%x)", "%1 = mul(%0, %0)", "return %1"], None),
    ],
    "fuse_residual": [
        (
            "with bias, and moved below what it adds",
            ["%0 = matmul(%x, @f, bias=@bias)", "%1 = silu(%y)", "%2 = add(%1, %0)", "return %2"],
            ["%1 = silu(%y)", "%2 = matmul(%x, @f, bias=@bias, residual=%1)", "return %2"],
        ),
        (
            "two matmuls: the second takes the first in",
            ["%0 = matmul(%x, @f)", "%1 = matmul(%y, @f)", "%2 = add(%0, %1)", "return %2"],
            ["%0 = matmul(%x, @f)", "%2 = matmul(%y, @f, residual=%0)", "return %2"],
        ),
        (
            "a chain of adds",
            ["%0 = matmul(%x, @f)", "%1 = add(%0, %y)", "%2 = matmul(%1, @f)", "%3 = add(%1, %2)",
             "return %3"],
            ["%1 = matmul(%x, @f, residual=%y)", "%3 = matmul(%1, @f, residual=%1)", "return %3"],
        ),
        (
            "it has a residual already: no",
            ["%0 = matmul(%x, @f, residual=%y)", "%1 = add(%x, %0)", "return %1"],
            None,
        ),
        ("doubled: no", ["%0 = matmul(%x, @f)", "%1 = add(%0, %0)", "return %1"], None),
    ],
    "legalize_activations": [
        (
            "for each reader anew",
            ["%0 = matmul(%x, @q)", "%1 = matmul(%x, @k, residual=%0)", "return %1"],
            ['%x.a8 = quantize(%x) {rows = "T"} : a8[T,64]', "%0 = matmul(%x.a8, @q)",
             '%x.a8_ = quantize(%x) {rows = "T"} : a8[T,64]',
             "%1 = matmul(%x.a8_, @k, residual=%0)", "return %1"],
        ),
        (
            "what is quantized stays",
            ['%0 = quantize(%x) {rows = "T"} : a8[T,64]', "%1 = matmul(%0, @q)",
             "%2 = matmul(%1, @f)", "return %2"],
            None,
        ),
    ],
    "quantize_activations": [
        (
            "once a value, before its first use",
            ["%0 = matmul(%x, @q)", "%1 = matmul(%x, @k, bias=@bias, residual=%0)", "return %1"],
            ['%x.a8 = quantize(%x) {rows = "T"} : a8[T,64]', "%0 = matmul(%x.a8, @q)",
             "%1 = matmul(%x.a8, @k, bias=@bias, residual=%0)", "return %1"],
        ),
        (
            "float weights read the value itself",
            ["%0 = matmul(%x, @f)", "%1 = matmul(%x, @q, residual=%0)", "return %1"],
            ["%0 = matmul(%x, @f)", '%x.a8 = quantize(%x) {rows = "T"} : a8[T,64]',
             "%1 = matmul(%x.a8, @q, residual=%0)", "return %1"],
        ),
        (
            "logits",
            ['%0 = logits(%x, @q) {rows = "R"} : f32[R,64]', "return %0"],
            ['%x.a8 = quantize(%x) {rows = "R"} : a8[R,64]',
             '%0 = logits(%x.a8, @q) {rows = "R"} : f32[R,64]', "return %0"],
        ),
        (
            "quantized already: one more is not wanted",
            ['%0 = quantize(%x) {rows = "T"} : a8[T,64]', "%1 = matmul(%0, @q)",
             "%2 = matmul(%x, @q, residual=%1)", "return %2"],
            ['%0 = quantize(%x) {rows = "T"} : a8[T,64]', "%1 = matmul(%0, @q)",
             "%2 = matmul(%0, @q, residual=%1)", "return %2"],
        ),
        (
            "the name is taken",
            ["%x.a8 = silu(%x)", "%0 = matmul(%x, @q, residual=%x.a8)", "return %0"],
            ["%x.a8 = silu(%x)", '%x.a8_ = quantize(%x) {rows = "T"} : a8[T,64]',
             "%0 = matmul(%x.a8_, @q, residual=%x.a8)", "return %0"],
        ),
    ],
    "layout": [
        (
            "matrices only: block-quantized ones in panels",
            ["%0 = matmul(%x, @q, bias=@bias)", "%1 = matmul(%0, @f)",
             '%2 = logits(%1, @k) {rows = "R"} : f32[R,64]', "return %2"],
            ["%0 = matmul(%x, @Q, bias=@bias)", "%1 = matmul(%0, @F)",
             '%2 = logits(%1, @K) {rows = "R"} : f32[R,64]', "return %2"],
        ),
        ("a group", [f"%0, %1 = matmul_group(%x, @q, @k) : {SQUARE}, {SQUARE}", "return %0, %1"],
         [f"%0, %1 = matmul_group(%x, @Q, @K) : {SQUARE}, {SQUARE}", "return %0, %1"]),
        ("no matrix", ["%0 = scale(%x, @gain)", "return %0"], None),
    ],
    "schedule_steps": [
        (
            "rows are repeated, matrices waited for",
            ["%0 = silu(%x)", "%1 = matmul(%0, @f)", "%2 = add(%1, %y)", "return %2"],
            ["repeat %0 = silu(%x)", "barrier if T > 1", "%1 = matmul(%0, @f)", "barrier",
             "repeat %2 = add(%1, %y)", "barrier", "return %2"],
        ),
        (
            "attention stores by row, then attends",
            [f"%0 = attention(%x, %x, %y) {ATTEND}", "%1 = silu(%0)", "return %1"],
            [f"repeat %0 = attention(%x, %x, %y) {ATTEND}", "barrier if T > 1", "then %0",
             "barrier", "repeat %1 = silu(%0)", "barrier", "return %1"],
        ),
    ],
}  # fmt: skip
# What the header looks like behind a pass that changes it.
HEADERS = {
    "layout": re.sub(r"@([fgqk])(: \w+\[64,64\])", lambda m: "@" + m[1].upper() + m[2]
                     + (" rows" if m[1] in "fg" else " panels"), HEADER),
    "schedule_steps": HEADER.replace("(%x", "(repeat %x"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        pytest.param(name, before, after, id=f"{name}: {title}")
        for name, cases in CASES.items()
        for title, before, after in cases
    ],
)
def test_rewrites(name: str, before: list[str], after: list[str] | None) -> None:
    """A pass fuses what it must not, misses what it should, or changes what is computed."""
    graph = _graph(*before)
    rewritten = PASS_BY_NAME[name].function(graph)
    verify(rewritten)
    wanted = _graph(*(after or before), header=HEADERS.get(name, HEADER))
    printed = re.sub(r"@[FGQK]\b", lambda m: m[0].lower(), print_graph(wanted))
    assert print_graph(rewritten) == printed
    np.testing.assert_allclose(_evaluate(rewritten), _evaluate(graph), rtol=1e-14)


def _evaluate(graph: Graph) -> np.ndarray:
    rng = np.random.default_rng(3)
    weights = {n: rng.normal(size=(64, 64)) for n in "fgqk"}
    weights |= {n: rng.normal(size=64) for n in ("gain", "bias")}
    weights |= {"ones": np.ones(64), "turns": np.ones(16), "minus": np.full(64, -0.0),
                "zeros": np.zeros(64)}  # fmt: skip
    inputs = {value.name: rng.normal(size=(3, 64)) for value in graph.inputs}
    table = np.arange(3), np.zeros(3, dtype=int), np.arange(3)
    return np.array(interpret(graph, inputs, weights.__getitem__, ReferenceCache(), *table))


def test_every_pass_is_a_file_a_function_and_has_cases() -> None:
    """The command line's names, the files' and the functions' are the same."""
    folder = Path(passes.__file__).parent
    for step in PIPELINE:
        assert (folder / f"{step.name}.py").is_file()
        assert step.function.__name__ == step.name
        assert step.function.__doc__
        assert CASES[step.name]


def test_figures_of_the_architecture_page() -> None:
    """435 operations, 49 + 24 fusions, 362 left, 363 values of 2760.5 KiB."""
    graph = qwen2_graph()
    assert len(graph.operations) == 435
    fused = fuse_swiglu(fuse_norm(graph))
    assert len(fused.operations) == 362
    assert (fused.kinds["rmsnorm"], fused.kinds["swiglu"]) == (49, 24)
    assert len(fused.values) == 363
    assert fused.activation_nbytes(1, 1) == 706_688 * 4 == 2760.5 * 1024


def test_reports_of_a_whole_run() -> None:
    graph, reports = run_pipeline(qwen2_graph(), check=True)
    assert [r.name for r in reports] == [p.name for p in PIPELINE]
    assert [r.ops_before for r in reports[1:]] == [r.ops_after for r in reports[:-1]]
    counts = {name: n for r in reports for name, n in r.counts.items()}
    wanted = {"rmsnorm": 49, "swiglu": 24, "matmul+residual": 48, "quantize": 4 * 24 + 1,
              "rope_store": 24, "attend": 24, "matmul_group": 24, "packed": 7 * 24 + 1,
              "repeated": 8 * 24 + 3, "barriers": 5 * 24 + 1}  # fmt: skip
    assert counts == wanted, "fuse_qkv and fuse_gate_up make 24 groups each"
    assert graph.kinds["matmul_group"] == 48
    assert len(graph.operations) == 362 - 48 + 97 - 24 - 3 * 24
    assert all(r.seconds >= 0 for r in reports)


@pytest.mark.parametrize(
    "disabled",
    [set(names) for n in (0, 1, len(TOGGLES) - 2, len(TOGGLES) - 1)
     for names in combinations(TOGGLES[:-1], n)],
)
def test_every_subset_of_passes_gives_a_sound_graph(disabled: set[str]) -> None:
    seen: list[str] = []
    graph, _ = run_pipeline(
        qwen2_graph(), disabled, lambda step, _: seen.append(step.name), check=True
    )
    verify(graph, legalized=True)
    assert seen == [p.name for p in PIPELINE if p.name not in disabled]
    assert ("rmsnorm" in graph.kinds) == ("fuse_norm" not in disabled)
    assert ("matmul+residual" in graph.kinds) == ("fuse_residual" not in disabled)


def test_passes_do_nothing_twice() -> None:
    once, _ = run_pipeline(qwen2_graph())
    again, _ = run_pipeline(once)
    assert again == once


def test_wrong_names_are_refused() -> None:
    graph = _graph("%0 = silu(%x)", "return %0")
    run_pipeline(graph, {"plan_memory"})
    with pytest.raises(UsageError, match="no such pass: got fuse_all, wanted dead_code or"):
        run_pipeline(graph, {"fuse_all"})
    with pytest.raises(UsageError, match="can't be switched off: got legalize_activations"):
        run_pipeline(graph, ["legalize_activations"])


def test_a_pass_that_breaks_the_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(graph: Graph) -> Graph:
        return graph.with_operations(graph.operations[::-1])

    monkeypatch.setattr(pipeline, "PIPELINE", (Pass("backwards", backwards),))
    graph = _graph("%0 = silu(%x)", "%1 = silu(%0)", "return %1")
    with pytest.raises(GraphError, match="after pass backwards: rule V2"):
        run_pipeline(graph, check=True)
