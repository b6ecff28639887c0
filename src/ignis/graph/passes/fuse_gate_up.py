"""The projections of gate and up become one op."""

from __future__ import annotations

from ignis.graph.ir import Graph
from ignis.graph.ir.ops import Geglu, Gelu, Matmul, Mul, Silu, Swiglu
from ignis.graph.passes.rewrite import group_matmuls


def fuse_gate_up(graph: Graph) -> Graph:
    """Group the two matmuls behind a swiglu or a geglu that read the same value.

        %0 = matmul(%x, @gate) : f32[T,256]
        %1 = matmul(%x, @up) : f32[T,256]
        %2 = swiglu(%0, %1) : f32[T,256]

    becomes

        %0, %1 = matmul_group(%x, @gate, @up) : f32[T,256], f32[T,256]
        %2 = swiglu(%0, %1) : f32[T,256]

    A mul of a silu counts as a swiglu, of a gelu as a geglu. Each output row is summed as before:
    the bits stay.
    """
    groups: list[list[Matmul]] = []
    for op in graph.operations:
        factors = (op.gate, op.up) if isinstance(op, Swiglu | Geglu) else ()
        if isinstance(op, Mul):
            factors = (op.a, op.b)
        producers = [graph.producers.get(value) for value in factors]
        if isinstance(op, Mul):
            producers = [
                graph.producers.get(p.x) if isinstance(p, Silu | Gelu) else p for p in producers
            ]
        groups.append([p for p in producers if isinstance(p, Matmul)])
    return group_matmuls(graph, groups)
