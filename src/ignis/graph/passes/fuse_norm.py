"""Normalize and scale become rmsnorm."""

from __future__ import annotations

from ignis.graph.ir import Graph, Operation
from ignis.graph.ir.ops import Normalize, Rmsnorm, Scale
from ignis.graph.passes.rewrite import Private, absorb


def fuse_norm(graph: Graph) -> Graph:
    """Fuse a normalize into the scale that alone reads it.

        %0 = normalize(%x) {eps = 1e-06} : f32[T,64]
        %1 = scale(%0, @gain) : f32[T,64]

    becomes

        %1 = rmsnorm(%x, @gain) {eps = 1e-06} : f32[T,64]

    Both compute (x * r) * gain: the bits stay.
    """
    return absorb(graph, _fuse)


def _fuse(op: Operation, private: Private) -> tuple[Operation, Operation] | None:
    if not isinstance(op, Scale):
        return None
    norm = private.get(op.x)
    if not isinstance(norm, Normalize) or norm.group != op.group:
        return None
    operands = {"x": norm.x, "gain": op.gain}
    return norm, Rmsnorm.create(operands, norm.attributes, [op.result.name])
