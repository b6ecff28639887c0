"""The projections of q, k and v become one op."""

from __future__ import annotations

from ignis.graph.ir import Graph, Value
from ignis.graph.ir.ops import Attention, Matmul, Normalize, Rmsnorm, Rope, RopeStore, Scale
from ignis.graph.passes.rewrite import group_matmuls


def fuse_qkv(graph: Graph) -> Graph:
    """Group the matmuls behind an attention's q, k and v that read the same value.

        %0 = matmul(%x, @q, bias=@bq) : f32[T,64]
        %1 = matmul(%x, @k) : f32[T,32]
        %2 = matmul(%x, @v) : f32[T,32]
        %3 = rope_store(%0, %1, %2) {layer = 0, ...} : f32[T,64]

    becomes

        %0, %1, %2 = matmul_group(%x, @q, @k, weight2=@v, bias0=@bq)
            : f32[T,64], f32[T,32], f32[T,32]
        %3 = rope_store(%0, %1, %2) {layer = 0, ...} : f32[T,64]

    (one line in fact). Where formats differ so that x is read in two forms, those that read the
    same form are grouped. Each output row is summed as before: the bits stay.
    """
    groups = [
        [m for value in (op.q, op.k, op.v) if (m := _projection(graph, value)) is not None]
        for op in graph.operations
        if isinstance(op, Attention | RopeStore)
    ]
    return group_matmuls(graph, groups)


def _projection(graph: Graph, value: Value) -> Matmul | None:
    """The matmul that a value comes from, perhaps through norms of its heads and rope."""
    op = graph.producers.get(value)
    while isinstance(op, Rope | Rmsnorm | Normalize | Scale):
        op = graph.producers.get(op.x)
    return op if isinstance(op, Matmul) else None
