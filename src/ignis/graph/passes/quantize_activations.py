"""Values that several integer matmuls read are quantized once."""

from __future__ import annotations

from ignis.graph.ir import Graph
from ignis.graph.passes.rewrite import quantize_operands


def quantize_activations(graph: Graph) -> Graph:
    """Put one quantize before the first matmul, of experts or not, that needs a value in A8.

        %0 = matmul(%x, @q) : f32[T,64]
        %1 = matmul(%x, @k) : f32[T,64]

    becomes

        %x.a8 = quantize(%x) {rows = "T"} : a8[T,64]
        %0 = matmul(%x.a8, @q) : f32[T,64]
        %1 = matmul(%x.a8, @k) : f32[T,64]

    with @q and @k of type q8_0, q4_0 or q4_1: their kernels multiply integers. Float weights
    read the f32 value itself. For logits only the rows that need them are quantized. Without
    this pass `legalize_activations` quantizes for each reader anew.
    """
    return quantize_operands(graph, once=True)
