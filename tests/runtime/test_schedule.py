"""Barriers of a plan, and the rules that find what is wrong with one.

What would be broken: a missing barrier is a race that shows once in a million steps; only a rule
that looks at every pair of launches finds it before.
"""

from __future__ import annotations

import pytest

from ignis.errors import GraphError
from ignis.graph.ir import TensorType, Value
from ignis.graph.models import build_graph
from ignis.graph.models.experts import Experts
from ignis.inspect import Compilation, StepPlan, inspect_graph
from ignis.kernels.elementwise import silu
from ignis.runtime import schedule
from ignis.runtime.launches import Launch
from ignis.runtime.schedule import RULES, Timetable, verify_schedule
from tests.graph.qwen_shape import QWEN2_05B, decoder_tensors, qwen2_graph

A, B, C = (Value(name, TensorType("f32", ("T", 64))) for name in "abc")


def _launch(reads: set[Value], writes: set[Value], shared: bool = True, per: str = "T") -> Launch:
    return Launch(None, silu(), {}, 1, frozenset(reads), frozenset(writes), per, shared=shared)


FIRST, SECOND = _launch(set(), {A}), _launch({A}, {B})
BY_ROW = _launch({B}, {C}, shared=False)
GOOD = [FIRST, SECOND, BY_ROW]
TIMETABLE = Timetable((False, False, True), (0, 1, 2))
BROKEN = {
    "S1": [(GOOD, TIMETABLE._replace(step=(0, 1, 3))), (GOOD, TIMETABLE._replace(step=(1, 1, 2))),
           (GOOD, TIMETABLE._replace(step=(0, 1))), (GOOD, TIMETABLE._replace(step=(0, 1, 0)))],
    "S2": [(GOOD[1:], Timetable((False, False), (0, 1)))],
    "S3": [(GOOD, TIMETABLE._replace(step=(0, 0, 1))), (GOOD, TIMETABLE._replace(step=(0, 1, 1)))],
    "S4": [([FIRST, FIRST], Timetable((False, False), (0, 0)))],
    "S5": [(GOOD, TIMETABLE._replace(repeated=(True, False, False)))],
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_broken_by_its_case(rule: str) -> None:
    verify_schedule(GOOD, TIMETABLE)
    for launches, timetable in BROKEN[rule]:
        with pytest.raises(GraphError, match=f"^rule {rule}: "):
            verify_schedule(launches, timetable)


def test_rows_of_one_thread_need_no_barrier() -> None:
    """Work divided evenly by token is read by the thread that wrote it; repeated work too."""
    rows = [_launch(set(), {A}, shared=False), _launch({A}, {B}, shared=False)]
    verify_schedule(rows, Timetable((False, False), (0, 0)))
    verify_schedule(rows, Timetable((True, True), (0, 0)))
    with pytest.raises(GraphError, match="rule S3"):
        verify_schedule(rows, Timetable((False, True), (0, 0)))
    logits = [rows[0], _launch({A}, {B}, shared=False, per="R")]
    with pytest.raises(GraphError, match="rule S3"):
        verify_schedule(logits, Timetable((False, False), (0, 0)))


def test_the_rules_are_those_of_the_docstring() -> None:
    lines = (schedule.verify_schedule.__doc__ or "").splitlines()
    assert [line.split()[0] for line in lines if line.strip().startswith("S")] == list(RULES)


@pytest.fixture(scope="module")
def decode() -> StepPlan:
    return inspect_graph(QWEN2_05B, qwen2_graph(), "q8_0", check=True).plan(1, 1)


def test_a_decode_layer_takes_five_steps(decode: StepPlan) -> None:
    """Qwen2.5-0.5B: 24 layers of five barriers, and one for the logits."""
    assert decode.timetable.n_steps == 5 * 24 + 1 <= 5 * 24 + 3


def test_every_barrier_is_needed(decode: StepPlan) -> None:
    """Taking away any one of them breaks a rule: there are no more than must be."""
    launches, steps = list(decode.launches), decode.timetable.step
    for gone in range(1, decode.timetable.n_steps, 7):
        fewer = tuple(step - (step >= gone) for step in steps)
        with pytest.raises(GraphError, match="rule S"):
            verify_schedule(launches, Timetable(decode.timetable.repeated, fewer))


def test_plans_are_at_the_bound() -> None:
    """The arena of every bucket is the peak of live bytes, to the byte."""
    compilation = inspect_graph(QWEN2_05B, qwen2_graph(), "q8_0", check=True)
    for n_tokens, n_logits in ((1, 1), (16, 8), (128, 64), (512, 1)):
        memory = compilation.plan(n_tokens, n_logits).memory
        assert memory.gap_bytes == 0
        assert memory.nbytes == memory.bound_bytes
    assert len(compilation.graph.operations) == 315
    decode = compilation.plan(1, 1).memory
    assert (decode.nbytes, decode.private_nbytes) == (41.5 * 1024, 26.125 * 1024)


@pytest.fixture(scope="module")
def experts() -> Compilation:
    """Qwen1.5-MoE-A2.7B's layer: a router, four of 60 experts, and a shared one."""
    config = QWEN2_05B._replace(
        architecture="qwen2moe", n_layers=3, n_embd=2048, n_heads=16, n_kv_heads=16,
        head_dim=128, rope_dim=128, n_ff=5632,
        experts=Experts(n_experts=60, n_used=4, n_ff=1408, n_ff_shared=5632, normalized=False),
    )  # fmt: skip
    graph = build_graph(config, decoder_tensors(config))
    return inspect_graph(config, graph, "q8_0", check=True)


def test_a_layer_of_experts_takes_six_steps(experts: Compilation) -> None:
    """One more than without: the router is waited for. The shared expert costs no barrier."""
    assert experts.plan(1, 1).timetable.n_steps == 6 * 3 + 1


def test_memory_of_experts_is_at_the_bound(experts: Compilation) -> None:
    """Rows of the chosen experts only."""
    for n_tokens, n_logits in ((1, 1), (16, 8), (512, 1)):
        memory = experts.plan(n_tokens, n_logits).memory
        assert memory.gap_bytes == 0
        rows = 4 * n_tokens * (1408 * 2 * 4 + 1408 // 32 * 48)  # gate, up, and gated in A8
        assert memory.nbytes <= rows + n_tokens * (2 * 2048 * 4 + 5632 * 2 * 4 + 4096) + 4096
