"""Matmuls with block-quantized weights read quantized activations (required)."""

from __future__ import annotations

from ignis.graph.ir import Graph, Operation, Value
from ignis.graph.ir.ops import PRODUCTS, Logits, Quantize
from ignis.graph.ir.types import BLOCK_FORMATS


def quantize_activations(graph: Graph) -> Graph:
    """Put one quantize before the first matmul, of experts or not, that needs a value in A8.

        %0 = matmul(%x, @q) : f32[T,64]
        %1 = matmul(%x, @k) : f32[T,64]

    becomes

        %x.a8 = quantize(%x) {rows = "T"} : a8[T,64]
        %0 = matmul(%x.a8, @q) : f32[T,64]
        %1 = matmul(%x.a8, @k) : f32[T,64]

    with @q and @k of type q8_0, q4_0 or q4_1: their kernels multiply integers. Float weights
    read the f32 value itself. For logits only the rows that need them are quantized.
    """
    taken = {value.name for value in graph.values}
    quantized: dict[tuple[Value, str], Value] = {
        (op.x, op.rows): op.result for op in graph.operations if isinstance(op, Quantize)
    }
    defined: set[Value] = set()
    operations: list[Operation] = []
    for op in graph.operations:
        if isinstance(op, PRODUCTS) and op.x.type.dtype == "f32" and _is_block_quantized(op):
            rows = "R" if isinstance(op, Logits) and op.x.type.shape[0] == "T" else "T"
            wanted = (op.x, rows)
            if quantized.get(wanted) not in defined:
                name = _fresh(f"{op.x.name}.a8", taken)
                quantize = Quantize.create({"x": op.x}, {"rows": rows}, [name])
                operations.append(quantize)
                quantized[wanted] = quantize.result
                defined.add(quantize.result)
            op = op.with_operands(x=quantized[wanted])
        operations.append(op)
        defined.update(op.results)
    return graph.with_operations(operations)


def _is_block_quantized(op: Operation) -> bool:
    return op.matrices[0].type.dtype in BLOCK_FORMATS


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
