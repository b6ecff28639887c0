"""Remove operations whose results nobody reads."""

from __future__ import annotations

from ignis.graph.ir import Graph, Operation


def dead_code(graph: Graph) -> Graph:
    """Remove operations that reach neither an output nor an effect.

        %0 = silu(%x) : f32[T,64]                   %1 = add(%x, %x) : f32[T,64]
        %1 = add(%x, %x) : f32[T,64]          ->    return %1
        return %1

    Attention writes the KV cache, so it stays whether or not its result is read.
    """
    needed = set(graph.outputs)
    kept: list[Operation] = []
    for op in reversed(graph.operations):
        if op.effect is not None or not needed.isdisjoint(op.results):
            needed.update(op.operands)
            kept.append(op)
    return graph.with_operations(kept[::-1])
