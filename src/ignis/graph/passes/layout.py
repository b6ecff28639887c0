"""Which weights are repacked when the model loads, and which are read where they lie."""

from __future__ import annotations

from dataclasses import replace

from ignis.graph.ir import Graph, Value
from ignis.graph.ir.types import BLOCK_FORMATS, PANELS, ROWS


def layout(graph: Graph) -> Graph:
    """Have matrices packed when the model loads: in panels of 16 rows, or as they lie.

        weights {                                   weights {
          @gain: f32[64]                              @gain: f32[64]
          @q: q4_0[64,64]                             @q: q4_0[64,64] panels
          @f: f16[64,64]                      ->      @f: f16[64,64] rows
        }                                           }
        %0 = matmul(%x.a8, @q) : f32[T,64]          %0 = matmul(%x.a8, @q) : f32[T,64]

    In a panel the lanes of a vector are rows, so that an integer matmul has no sum across lanes.
    Rows of f32, f16 and bf16 are multiplied as they lie; packed they gain by huge pages.
    `--weights mapped` leaves this pass out, and so does `auto` where all of it would not fit well
    into memory: every weight is then read from the mapped file.
    """
    packed = packed_weights(graph)
    operations = [
        op if packed.keys().isdisjoint(op.operands)
        else replace(op, arguments=tuple(a and packed.get(a, a) for a in op.arguments))
        for op in graph.operations
    ]  # fmt: skip
    return graph.with_operations(operations)


def packed_weights(graph: Graph) -> dict[Value, Value]:
    """The matrices, each with what it becomes when it is packed."""
    return {
        weight: weight._replace(type=weight.type._replace(layout=_layout(weight)))
        for op in graph.operations
        for weight in op.matrices
    }


def _layout(matrix: Value) -> str:
    return PANELS if matrix.type.dtype in BLOCK_FORMATS else ROWS
