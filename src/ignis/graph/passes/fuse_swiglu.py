"""Silu and mul become swiglu."""

from __future__ import annotations

from ignis.graph.ir import Graph, Operation
from ignis.graph.ir.ops import Mul, Silu, Swiglu
from ignis.graph.passes.rewrite import Private, absorb


def fuse_swiglu(graph: Graph) -> Graph:
    """Fuse a silu into the mul that alone reads it.

        %0 = silu(%gate) : f32[T,256]
        %1 = mul(%0, %up) : f32[T,256]

    becomes

        %1 = swiglu(%gate, %up) : f32[T,256]

    Multiplication commutes, so either operand of the mul may be the silu: the bits stay.
    """
    return absorb(graph, _fuse)


def _fuse(op: Operation, private: Private) -> tuple[Operation, Operation] | None:
    if not isinstance(op, Mul):
        return None
    for gated, up in ((op.a, op.b), (op.b, op.a)):
        silu = private.get(gated)
        if isinstance(silu, Silu):
            operands = {"gate": silu.x, "up": up}
            return silu, Swiglu.create(operands, {}, [op.result.name])
    return None
