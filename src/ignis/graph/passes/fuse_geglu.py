"""Gelu and mul become geglu."""

from __future__ import annotations

from ignis.graph.ir import Graph, Operation
from ignis.graph.ir.ops import Geglu, Gelu, Mul
from ignis.graph.passes.rewrite import Private, absorb


def fuse_geglu(graph: Graph) -> Graph:
    """Fuse a gelu into the mul that alone reads it.

        %0 = gelu(%gate) : f32[T,256]
        %1 = mul(%0, %up) : f32[T,256]

    becomes

        %1 = geglu(%gate, %up) : f32[T,256]

    Multiplication commutes, so either operand of the mul may be the gelu: the bits stay.
    """
    return absorb(graph, _fuse)


def _fuse(op: Operation, private: Private) -> tuple[Operation, Operation] | None:
    if not isinstance(op, Mul):
        return None
    for gated, up in ((op.a, op.b), (op.b, op.a)):
        gelu = private.get(gated)
        if isinstance(gelu, Gelu):
            operands = {"gate": gelu.x, "up": up}
            return gelu, Geglu.create(operands, {}, [op.result.name])
    return None
