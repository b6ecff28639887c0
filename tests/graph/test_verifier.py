"""Each rule of the verifier has one graph that breaks it and no other rule before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ignis.errors import GraphError
from ignis.graph.ir import Graph, Operation, TensorType, Value, parse_graph, verify
from ignis.graph.ir.ops import Silu
from ignis.graph.ir.schedule import Schedule
from ignis.graph.ir.verifier import RULES

GOOD = parse_graph("""
graph(%x: f32[T,64]) {
  weights {
    @q: q8_0[64,64]
    @gain: f32[64]
  }
  %0 = scale(%x, @gain) : f32[T,64]
  %1 = matmul(%0, @q) : f32[T,64]
  %2 = attention(%1, %1, %1) {layer = 0, n_heads = 2, n_kv_heads = 2, head_dim = 32, scale = 0.1} : f32[T,64]
  %3 = attention(%2, %1, %1) {layer = 1, n_heads = 2, n_kv_heads = 2, head_dim = 32, scale = 0.1} : f32[T,64]
  return %3
}
""")  # noqa: E501  # one operation a line

STORED = parse_graph("""
graph(%x: f32[T,64]) {
  %0 = rope_store(%x, %x, %x) {layer = 3, style = "neox", head_dim = 32, n_rot = 32, base = 1e4} : f32[T,64]
  %1 = attend(%x) {layer = 3, n_heads = 2, n_kv_heads = 2, head_dim = 32, scale = 0.1} : f32[T,64]
  return %1
}
""")  # noqa: E501


def _with(index: int, change: Callable[[Operation], Operation]) -> Graph:
    operations = list(GOOD.operations)
    operations[index] = change(operations[index])
    return GOOD.with_operations(operations)


def _typed(*shape: int | str) -> TensorType:
    return TensorType("f32", shape)


def _widened_gain(op: Operation) -> Operation:
    return replace(op, arguments=(op.arguments[0], Value("q", _typed(64), is_weight=True)))


def _constant_gain(op: Operation) -> Operation:
    x, gain = op.operands
    return replace(op, arguments=(x, gain._replace(splat=1.0)))


def _floats_in_panels(op: Operation) -> Operation:
    return op.with_operands(weight=Value("q", TensorType("f16", (64, 64), "panels"), True))


def _kept_as(op: Operation, kv_type: str) -> Operation:
    return replace(op, attributes={**op.attributes, "kv_type": kv_type})


(X,) = GOOD.inputs
CONSTANT_X = X._replace(splat=0.5)
SEVEN = Value("x", _typed(7, 64))
SCALE, MATMUL, FIRST, SECOND = range(4)
BROKEN = {
    "V1": _with(MATMUL, lambda op: replace(op, results=(Value("x", _typed("T", 64)),))),
    "V2": GOOD.with_operations([GOOD.operations[i] for i in (MATMUL, SCALE, FIRST, SECOND)]),
    "V3": _with(SCALE, lambda op: replace(op, arguments=(op.arguments[0], op.arguments[0]))),
    "V4": _with(FIRST, lambda op: replace(op, attributes={**op.attributes, "colour": 3})),
    "V5": _with(SECOND, lambda op: replace(op, results=(Value("3", _typed("T", 65)),))),
    "V6": _with(SCALE, _widened_gain),
    "V7": replace(GOOD, outputs=(Value("9", _typed("T", 64)),)),
    "V8": _with(SECOND, lambda op: replace(op, attributes={**op.attributes, "layer": 0})),
    "V9": replace(GOOD, inputs=(*GOOD.inputs, Value("w", _typed(4), is_weight=True))),
    "V10": GOOD,
    "V11": STORED.with_operations([op for op in STORED.operations if op.name != "rope_store"]),
    "V13": _with(MATMUL, _floats_in_panels),
    "V14": replace(STORED, schedule=Schedule.plain(2)),
    "V15": STORED.with_operations([STORED.operations[0], _kept_as(STORED.operations[1], "q8_0")]),
    "V12": Graph((SEVEN,), (Silu.create({"x": SEVEN}, {}, ["0"]),), (SEVEN,)),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_broken_by_its_case(rule: str) -> None:
    """A rule that never fires protects nothing."""
    verify(GOOD)
    with pytest.raises(GraphError, match=rf"^rule {rule}: "):
        verify(BROKEN[rule], legalized=True)


def test_more_ways_to_break_the_rules() -> None:
    cases = {
        "V2": _with(MATMUL, lambda op: replace(
            op, arguments=(Value("0", _typed("T", 32)), *op.arguments[1:]))),
        "V3": _with(SCALE, lambda op: replace(op, arguments=op.arguments[:1])),
        "V6": GOOD.with_operations([
            *GOOD.operations,
            replace(_constant_gain(GOOD.operations[SCALE]), results=(Value("9", X.type),)),
        ]),
        "V7": replace(GOOD, outputs=()),
        "V8": STORED.with_operations([*STORED.operations[:1], replace(
            STORED.operations[0], results=(Value("9", _typed("T", 64)),)), *STORED.operations[1:]]),
        "V9": Graph((CONSTANT_X,), (Silu.create({"x": CONSTANT_X}, {}, ["0"]),), (CONSTANT_X,)),
        "V4": _with(FIRST, lambda op: _kept_as(op, "q4_0")),
        "V15": GOOD.with_operations([*GOOD.operations[:3], _kept_as(GOOD.operations[3], "f32")]),
        "V12": Graph((Value("x", _typed("T", "R")),), (), (Value("x", _typed("T", "R")),)),
    }  # fmt: skip
    for rule, graph in cases.items():
        with pytest.raises(GraphError, match=rf"^rule {rule}: "):
            verify(graph)


def test_the_rules_are_those_at_the_top_of_the_file() -> None:
    from ignis.graph.ir import verifier

    listed = [line.split()[0] for line in (verifier.__doc__ or "").splitlines() if "V" in line[:6]]
    assert listed == list(RULES)
