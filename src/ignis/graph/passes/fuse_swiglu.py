"""Silu and mul become swiglu."""

from __future__ import annotations

from ignis.graph.ir import Graph
from ignis.graph.ir.ops import Silu, Swiglu
from ignis.graph.passes.rewrite import fuse_gated


def fuse_swiglu(graph: Graph) -> Graph:
    """Fuse a silu into the mul that alone reads it.

        %0 = silu(%gate) : f32[T,256]
        %1 = mul(%0, %up) : f32[T,256]

    becomes

        %1 = swiglu(%gate, %up) : f32[T,256]

    Multiplication commutes, so either operand of the mul may be the silu: the bits stay.
    """
    return fuse_gated(graph, Silu, Swiglu)
