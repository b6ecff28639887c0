"""The memory plan: small, and never two live values in one place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ignis.errors import GraphError
from ignis.graph.ir import Builder, Graph, TensorType, Value, parse_graph
from ignis.graph.passes import MemoryPlan, memory_plan, plan_memory, run_pipeline, verify_plan
from ignis.graph.passes.fuse_norm import fuse_norm
from ignis.graph.passes.fuse_swiglu import fuse_swiglu
from ignis.graph.passes.memory_plan import RULES, Timing
from tests.graph.qwen_shape import qwen2_graph

KIB = 1024


def _pairwise_fused() -> Graph:
    return fuse_swiglu(fuse_norm(qwen2_graph()))


def test_arena_of_a_decode_step() -> None:
    """A buffer-reuse scan needs 669.5 KiB for 363 values; the peak of live bytes is 597."""
    plan = plan_memory(_pairwise_fused(), 1, 1)
    assert (plan.n_values, plan.naive_nbytes) == (363, 2760.5 * KIB)
    assert plan.nbytes == plan.bound_bytes == 597.0 * KIB <= 669.5 * KIB
    assert plan.n_buffers <= 10


@pytest.mark.parametrize(("in_place", "kib"), [(False, 60.5), (True, 45.0)])
def test_arena_without_logits(in_place: bool, kib: float) -> None:
    plan = plan_memory(_pairwise_fused(), 1, 1, outputs_in_arena=False, in_place=in_place)
    assert plan.nbytes == plan.bound_bytes == kib * KIB
    assert plan.output_nbytes == 151936 * 4


@pytest.mark.parametrize(("n_tokens", "n_logits"), [(1, 1), (7, 1), (64, 64), (512, 1)])
@pytest.mark.parametrize("outputs_in_arena", [False, True])
def test_arena_after_the_whole_pipeline(
    n_tokens: int, n_logits: int, outputs_in_arena: bool
) -> None:
    graph, _ = run_pipeline(qwen2_graph())
    plan = plan_memory(graph, n_tokens, n_logits, outputs_in_arena=outputs_in_arena)
    assert plan.nbytes == plan.bound_bytes
    if n_tokens == 1:
        assert plan.nbytes <= 669.5 * KIB


def test_without_reuse_every_value_has_its_own_place() -> None:
    graph = _pairwise_fused()
    plan = plan_memory(graph, 1, 1, reuse=False)
    assert plan.n_buffers == plan.n_values == 363
    assert plan.nbytes == plan.naive_nbytes


CHAIN = parse_graph("""
graph(%x: f32[T,64]) {
  %0 = silu(%x) : f32[T,64]
  %1 = add(%x, %0) : f32[T,64]
  %2 = quantize(%1) {rows = "T"} : a8[T,64]
  %3 = mul(%1, %1) : f32[T,64]
  return %3, %3
}
""")


def _offset(plan: MemoryPlan, name: str) -> int:
    return next(offset for value, offset in plan.offsets.items() if value.name == name)


def test_results_take_the_place_of_operands_that_die() -> None:
    plan = plan_memory(CHAIN, 1, 1)
    assert _offset(plan, "0") != _offset(plan, "x"), "%x is read again"
    assert _offset(plan, "1") == _offset(plan, "x")
    assert _offset(plan, "3") == _offset(plan, "1")
    assert plan.nbytes == plan.bound_bytes == 2 * 256


def test_a_value_read_twice_by_an_op_is_replaced_once() -> None:
    graph = parse_graph("graph(%x: f32[T,64]) {\n%0 = add(%x, %x) : f32[T,64]\nreturn %0\n}")
    assert plan_memory(graph, 1, 1).nbytes == 256


def test_inputs_that_are_outputs_live_to_the_end() -> None:
    graph = parse_graph("graph(%x: f32[T,64]) {\n%0 = silu(%x) : f32[T,64]\nreturn %0, %x\n}")
    assert plan_memory(graph, 1, 1).nbytes == 512
    assert plan_memory(graph, 1, 1, outputs_in_arena=False).nbytes == 0


def test_a_result_nobody_reads_still_needs_a_place() -> None:
    """It is written: without a place of its own it would overwrite a live value."""
    plan = plan_memory(CHAIN, 1, 1)
    unread = _offset(plan, "2")
    assert unread != _offset(plan, "1")


def _moved(plan: MemoryPlan, name: str, offset: int) -> MemoryPlan:
    return plan._replace(
        offsets={v: offset if v.name == name else o for v, o in plan.offsets.items()}
    )


def test_the_check_of_a_plan_finds_what_is_wrong() -> None:
    """A check that passes everything would hide every bug of the planner."""
    plan = plan_memory(CHAIN, 1, 1)
    verify_plan(plan)
    for name, offset, message in (
        ("0", _offset(plan, "x"), "%0 overlaps %x while both live"),
        ("2", _offset(plan, "1"), "%2 overlaps %1 while both live"),
        ("1", _offset(plan, "x") + 64, "lies unaligned or outside|overlaps"),
        ("2", 30, "lies unaligned or outside"),
        ("2", -64, "lies unaligned or outside"),
        ("3", plan.nbytes, "lies unaligned or outside"),
    ):
        with pytest.raises(GraphError, match=message):
            verify_plan(_moved(plan, name, offset))
    missing = {v: o for v, o in plan.offsets.items() if v.name != "0"}
    with pytest.raises(GraphError, match="no place in the arena: got %0"):
        verify_plan(plan._replace(offsets=missing))


TIMED = plan_memory(
    CHAIN, 1, 1, timing=Timing(((0, 0), (1, 1), (1, 1), (2, 2)), frozenset({CHAIN.values[1]}))
)
BROKEN: dict[str, list[MemoryPlan]] = {
    "P1": [TIMED._replace(offsets={v: o for v, o in TIMED.offsets.items() if v.name != "0"})],
    "P2": [_moved(TIMED, "0", TIMED.private_nbytes), _moved(TIMED, "2", 30)],
    "P3": [_moved(TIMED, "2", _offset(TIMED, "1"))],
    "P4": [TIMED._replace(naive_nbytes=7), TIMED._replace(output_nbytes=4),
           TIMED._replace(bound_bytes=TIMED.nbytes + 1), TIMED._replace(private_bound_bytes=999)],
    "P5": [TIMED._replace(timing=TIMED.timing._replace(steps=((0, 0), (2, 2), (2, 2), (1, 1)))),
           TIMED._replace(timing=TIMED.timing._replace(steps=((0, 0), (1, 0), (1, 1), (2, 2)))),
           plan_memory(CHAIN, 1, 1)._replace(timing=Timing(()))],
    "P6": [plan_memory(CHAIN, 1, 1)],
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_broken_by_its_case(rule: str) -> None:
    """A rule that never fires protects nothing. (P3 looks at lives, so P5 is checked alone.)"""
    for plan in BROKEN[rule]:
        if rule == "P6":
            private = frozenset({CHAIN.outputs[0]})
            plan = plan._replace(timing=plan.timing._replace(private=private))
        with pytest.raises(GraphError):
            RULES[rule](plan)
        if rule not in ("P5", "P6"):
            with pytest.raises(GraphError, match=f"^rule {rule}: "):
                verify_plan(plan)


def test_the_rules_are_those_at_the_top_of_the_file() -> None:
    lines = (memory_plan.__doc__ or "").splitlines()
    listed = [line.split()[0] for line in lines if "P" in line[:6]]
    assert listed == list(RULES)


def test_rounding_costs_no_memory() -> None:
    """Values of 96 bytes begin where the one before ends, not at the next cache line."""
    graph = parse_graph("graph(%x: f32[T,24]) {\n%0 = silu(%x) : f32[T,24]\n"
                        "%1 = add(%0, %x) : f32[T,24]\nreturn %1\n}")  # fmt: skip
    plan = plan_memory(graph, 1, 1)
    assert (plan.nbytes, plan.bound_bytes, plan.gap_bytes) == (192, 192, 0)


@pytest.mark.parametrize(("n_tokens", "n_logits"), [(0, 1), (1, -1)])
def test_counts_are_checked(n_tokens: int, n_logits: int) -> None:
    with pytest.raises(GraphError, match="nothing to plan"):
        plan_memory(CHAIN, n_tokens, n_logits)


@st.composite
def _graphs(draw: st.DrawFn) -> Graph:
    """Random elementwise and matmul graphs over three widths, some results unread."""
    b = Builder()
    by_width: dict[int, list[Value]] = {}
    for width in (32, 64, 160):
        by_width[width] = [b.input(f"x{width}", TensorType("f32", ("T", width)))]
    for _ in range(draw(st.integers(1, 20))):
        width = draw(st.sampled_from(sorted(by_width)))
        value = st.sampled_from(by_width[width])
        kind = draw(st.sampled_from(["silu", "add", "swiglu", "matmul", "residual", "quantize"]))
        if kind == "silu":
            by_width[width].append(b.silu(draw(value)))
        elif kind == "quantize":
            b.quantize(draw(value))
        elif kind in ("add", "swiglu"):
            by_width[width].append(getattr(b, kind)(draw(value), draw(value)))
        else:
            out = draw(st.sampled_from(sorted(by_width)))
            weight = b.weight(f"w{out}.{width}", TensorType("f32", (out, width)))
            residual = draw(st.sampled_from(by_width[out])) if kind == "residual" else None
            by_width[out].append(b.matmul(draw(value), weight, residual=residual))
    last = [values[-1] for values in by_width.values()]
    return b.finish(*draw(st.lists(st.sampled_from(last), min_size=1, max_size=3)))


@given(_graphs(), st.integers(1, 9), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_random_graphs(graph: Graph, n_tokens: int, in_place: bool, inside: bool) -> None:
    """plan_memory verifies its plans itself; here they also stay within their bounds."""
    plan = plan_memory(graph, n_tokens, 1, in_place=in_place, outputs_in_arena=inside)
    assert plan.bound_bytes <= plan.nbytes <= plan.naive_nbytes + 64 * plan.n_values
    apart = plan_memory(graph, n_tokens, 1, reuse=False)
    assert apart.n_buffers == apart.n_values
