"""What fusing passes share: a consumer absorbs the op that produces one of its operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ignis.graph.ir import Graph, Operation, Value

Private: TypeAlias = Mapping[Value, Operation]
"""Producers of the values that are read exactly once, effects left out."""

Rule: TypeAlias = Callable[[Operation, Private], "tuple[Operation, Operation] | None"]
"""For a consumer: the op it absorbs and the fused op that replaces it; or None."""


def absorb(graph: Graph, rule: Rule) -> Graph:
    """Apply a rule to every operation; the fused op stands where the consumer stood.

    The absorbed op moves down to its consumer, which is safe: operands are immutable, and ops
    with an effect never move.
    """
    private = {
        value: op
        for value, op in graph.producers.items()
        if graph.use_counts[value] == 1 and value not in graph.outputs and op.effect is None
    }
    absorbed: set[Value] = set()
    operations: list[Operation] = []
    for op in graph.operations:
        found = rule(op, private)
        if found is not None:
            absorbed.update(found[0].results)
        operations.append(op if found is None else found[1])
    return graph.with_operations([op for op in operations if absorbed.isdisjoint(op.results)])
