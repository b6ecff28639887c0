"""Weights that are known to change nothing are not read."""

from __future__ import annotations

from dataclasses import replace

from ignis.graph.ir import Graph, Operation, Value
from ignis.graph.ir.ops import Matmul, Normalize, Rmsnorm, Rope, RopeStore, Scale


def fold_constants(graph: Graph) -> Graph:
    """Drop gains and rope factors whose elements are all one, and biases that are all -0.

        weights { @gain: f32[64] = 1.0  @factors: f32[16] = 1.0 }
        %0 = rmsnorm(%x, @gain) {eps = 1e-06} : f32[T,64]
        %1 = rope(%0, factors=@factors) {...} : f32[T,64]

    becomes

        %0 = normalize(%x) {eps = 1e-06} : f32[T,64]
        %1 = rope(%0) {...} : f32[T,64]

    Every op reads an activation, so no op is constant as a whole; what can be folded is an operand
    that is neutral to the last bit. x * 1 is x, and a frequency divided by 1 stays. A bias of zeros
    is not neutral: it turns -0 into +0. Adding -0 changes nothing.
    """
    renamed: dict[Value, Value] = {}
    kept: list[Operation] = []
    for op in graph.operations:
        if not renamed.keys().isdisjoint(op.operands):
            op = replace(op, arguments=tuple(a and renamed.get(a, a) for a in op.arguments))
        if isinstance(op, Scale) and op.gain.splat == 1.0:
            renamed[op.result] = op.x
        else:
            kept.append(_folded(op))
    return graph.with_operations(kept, [renamed.get(value, value) for value in graph.outputs])


def _folded(op: Operation) -> Operation:
    if isinstance(op, Rmsnorm) and op.gain.splat == 1.0:
        return Normalize.create({"x": op.x}, op.attributes, [op.result.name])
    if isinstance(op, Rope | RopeStore) and op.factors is not None and op.factors.splat == 1.0:
        return op.with_operands(factors=None)
    if isinstance(op, Matmul) and op.bias is not None and _is_minus_zero(op.bias.splat):
        return op.with_operands(bias=None)
    return op


def _is_minus_zero(number: float | None) -> bool:
    return number == 0 and repr(number) == "-0.0"
