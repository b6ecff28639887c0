"""What is computed twice is computed once."""

from __future__ import annotations

from dataclasses import replace

from ignis.graph.ir import Graph, Operation, Value
from ignis.graph.ir.ops import Add, Mul

_COMMUTATIVE = (Add, Mul)


def common_subexpressions(graph: Graph) -> Graph:
    """Replace an op by an earlier one of the same kind, operands and attributes.

        %0 = silu(%x) : f32[T,64]                   %0 = silu(%x) : f32[T,64]
        %1 = silu(%x) : f32[T,64]             ->    %2 = add(%0, %y) : f32[T,64]
        %2 = add(%0, %y) : f32[T,64]                %4 = mul(%2, %2) : f32[T,64]
        %3 = add(%y, %1) : f32[T,64]                return %4
        %4 = mul(%2, %3) : f32[T,64]
        return %4

    Sums and products of two values commute, also in their bits. Ops that write a KV cache stay.
    The plain lowering of today's models computes nothing twice; graphs from elsewhere may.
    """
    known: dict[object, Operation] = {}
    renamed: dict[Value, Value] = {}
    kept: list[Operation] = []
    for op in graph.operations:
        if not renamed.keys().isdisjoint(op.operands):
            op = replace(op, arguments=tuple(a and renamed.get(a, a) for a in op.arguments))
        first = known.setdefault(_key(op), op) if op.effect is None else op
        if first is op:
            kept.append(op)
        else:
            renamed |= dict(zip(op.results, first.results, strict=True))
    return graph.with_operations(kept, [renamed.get(value, value) for value in graph.outputs])


def _key(op: Operation) -> object:
    """Equal for ops that compute the same bits."""
    arguments: object = op.arguments
    if isinstance(op, _COMMUTATIVE):
        arguments = frozenset(op.arguments)
    return op.name, arguments, tuple(sorted(op.attributes.items()))
