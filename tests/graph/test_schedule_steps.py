"""Barriers and repeated work on small graphs: as late as possible, and no more than must be.

What would be broken: a barrier too few is a race, one too many costs every token.
"""

from __future__ import annotations

import pytest

from ignis.errors import GraphError
from ignis.graph.ir import Graph, parse_graph, print_graph
from ignis.graph.ir.schedule import Schedule
from ignis.graph.passes.memory_plan import Timing
from ignis.graph.passes.schedule_steps import schedule_steps

ATTEND = "{layer = 0, n_heads = 2, n_kv_heads = 2, head_dim = 32, scale = 0.5}"


def scheduled(*lines: str) -> list[str]:
    """The body's lines after the pass, without what stands behind an op's name."""
    typed = [line if " : " in line or line[0] == "r" else f"{line} : f32[T,64]" for line in lines]
    weights = "\n".join(f"@{n}: f32[64,64]" for n in "abc" if f"@{n}" in " ".join(lines))
    graph = schedule_steps(parse_graph("\n".join(
        ["graph(%x: f32[T,64]) {", *(["weights {", weights, "}"] if weights else []), *typed, "}"]
    )))  # fmt: skip
    assert parse_graph(print_graph(graph)) == graph
    text = print_graph(graph).splitlines()
    begin = text.index("  }") + 1 if weights else 1
    return [line.strip().partition("(")[0] for line in text[begin:-2]]


def test_what_nobody_reads_stands_side_by_side() -> None:
    assert scheduled("%0 = matmul(%x, @a)", "%1 = matmul(%x, @b)", "%2 = matmul(%0, @c)",
                     "return %1, %2") == [
        "barrier if T > 1", "%0 = matmul", "%1 = matmul", "barrier", "%2 = matmul", "barrier",
    ]  # fmt: skip


def test_rows_follow_rows_of_the_same_kind() -> None:
    """Divided by token alike; rows of logits are divided anew, and one token is repeated."""
    assert scheduled("%0 = silu(%x)", "%1 = quantize(%0) {rows = \"R\"} : a8[R,64]",
                     "%2 = add(%0, %x)", "return %2") == [
        "repeat %0 = silu", "barrier if T > 1", "repeat %1 = quantize", "repeat %2 = add",
        "barrier",
    ]  # fmt: skip


def test_an_op_of_two_stages_has_a_barrier_inside() -> None:
    """Keys are stored row by row, attention reads those of other threads."""
    assert scheduled(f"%0 = attention(%x, %x, %x) {ATTEND}", "return %0") == [
        "repeat %0 = attention", "barrier if T > 1", "then %0", "barrier",
    ]  # fmt: skip


def test_barriers_of_one_token_can_stand_where_others_need_none() -> None:
    """Late placement: what waited already for an earlier reader need not wait again."""
    lines = scheduled("%0 = matmul(%x, @a)", "%1 = silu(%x)", "%2 = matmul(%1, @b)",
                      "%3 = matmul(%0, @c)", "return %2, %3")  # fmt: skip
    assert lines == [
        "barrier if T > 1", "%0 = matmul", "repeat %1 = silu", "barrier if T > 1", "%2 = matmul",
        "barrier if T = 1", "%3 = matmul", "barrier",
    ]  # fmt: skip


def _two_ops(schedule: Schedule | None = None) -> Graph:
    graph = parse_graph("graph(%x: f32[T,64]) {\nweights {\n@a: f32[64,64]\n}\n"
                        "%0 = silu(%x) : f32[T,64]\n%1 = matmul(%0, @a) : f32[T,64]\n"
                        "return %1\n}")  # fmt: skip
    return Graph(graph.inputs, graph.operations, graph.outputs, schedule)


def test_times_are_those_of_the_schedule() -> None:
    """What the memory planner takes for side by side is what runs side by side."""
    graph = schedule_steps(_two_ops())
    one, many = Timing.of(graph, one=True), Timing.of(graph, one=False)
    assert one.steps == ((0, 0), (0, 0)) and many.steps == ((0, 0), (1, 1))
    assert {v.name for v in one.private} == {"x", "0"} and not many.private
    plain = Timing.of(_two_ops(), one=True)
    assert plain.steps == ((1, 1), (2, 2)) and not plain.private


def test_a_plain_schedule_repeats_nothing() -> None:
    schedule = Schedule.plain(3)
    assert schedule.steps(one=True) == schedule.steps(one=False) == (0, 1, 2)
    assert schedule.n_barriers(one=True) == 3


@pytest.mark.parametrize(("line", "message"), [
    ("barrier if T > 2", "line 5: no such barrier: got barrier if T > 2, wanted barrier or"),
    ("barrier\nbarrier", "line 6: two barriers in a row"),
    ("then %0", "line 5: a stage does not follow its op: got then %0, wanted another op"),
    ("%0 = silu(%x) : f32[T,64]\nthen %x", "got then %x, wanted then %0"),
    ("repeat %0 = matmul(%x, @a) : f32[T,64]\nbarrier", "V14: %0: work that threads share in"),
    ("barrier\n%0 = silu(%x) : f32[T,64]", "V14: threads do not meet at the end"),
    ("%0 = silu(%x) : f32[T,64]\nbarrier\nthen %0\nbarrier", "V14: the schedule does not fit"),
])  # fmt: skip
def test_malformed_schedules_are_refused(line: str, message: str) -> None:
    with pytest.raises(GraphError) as caught:
        parse_graph("graph(%x: f32[T,64]) {\nweights {\n@a: f32[64,64]\n}\n"
                    f"{line}\n%9 = matmul(%x, @a) : f32[T,64]\nreturn %9\n}}")  # fmt: skip
    assert message in str(caught.value)
