"""Gelu and mul become geglu."""

from __future__ import annotations

from ignis.graph.ir import Graph
from ignis.graph.ir.ops import Geglu, Gelu
from ignis.graph.passes.rewrite import fuse_gated


def fuse_geglu(graph: Graph) -> Graph:
    """Fuse a gelu into the mul that alone reads it.

        %0 = gelu(%gate) : f32[T,256]
        %1 = mul(%0, %up) : f32[T,256]

    becomes

        %1 = geglu(%gate, %up) : f32[T,256]

    Multiplication commutes, so either operand of the mul may be the gelu: the bits stay.
    """
    return fuse_gated(graph, Gelu, Geglu)
