"""Matmuls with block-quantized weights read quantized activations (required)."""

from __future__ import annotations

from ignis.graph.ir import Graph
from ignis.graph.passes.rewrite import quantize_operands


def legalize_activations(graph: Graph) -> Graph:
    """Put a quantize before each product that still reads f32 where its kernel needs A8.

        %0 = matmul(%x, @q) : f32[T,64]
        %1 = matmul(%x, @k) : f32[T,64]

    becomes

        %x.a8 = quantize(%x) {rows = "T"} : a8[T,64]
        %0 = matmul(%x.a8, @q) : f32[T,64]
        %x.a8_ = quantize(%x) {rows = "T"} : a8[T,64]
        %1 = matmul(%x.a8_, @k) : f32[T,64]

    Nothing is left to do behind quantize_activations, which can be switched off. This pass can't:
    there is no kernel that multiplies block-quantized weights by f32.
    """
    return quantize_operands(graph, once=False)
