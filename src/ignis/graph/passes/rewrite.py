"""What fusing passes share: a consumer absorbs the op that produces one of its operands, and
matmuls that read one value become a group, what they read is quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ignis.graph.ir import Graph, Operation, Value
from ignis.graph.ir.ops import PRODUCTS, Logits, Matmul, MatmulGroup, Mul, Quantize
from ignis.graph.ir.types import BLOCK_FORMATS

Private: TypeAlias = Mapping[Value, Operation]
"""Producers of the values that are read exactly once, effects left out."""

Rule: TypeAlias = Callable[[Operation, Private], "tuple[Operation, Operation] | None"]
"""For a consumer: the op it absorbs and the fused op that replaces it; or None."""


def absorb(graph: Graph, rule: Rule) -> Graph:
    """Apply a rule to every operation; the fused op stands where the consumer stood.

    The absorbed op moves down to its consumer, which is safe: operands are immutable, and ops
    with an effect never move.
    """
    private = {
        value: op
        for value, op in graph.producers.items()
        if graph.use_counts[value] == 1 and value not in graph.outputs and op.effect is None
    }
    absorbed: set[Value] = set()
    operations: list[Operation] = []
    for op in graph.operations:
        found = rule(op, private)
        if found is not None:
            absorbed.update(found[0].results)
        operations.append(op if found is None else found[1])
    return graph.with_operations([op for op in operations if absorbed.isdisjoint(op.results)])


def fuse_gated(graph: Graph, unit: type[Operation], gated: type[Operation]) -> Graph:
    """Fuse a `unit` (silu, say) into the mul that alone reads it: a `gated` op of gate and up."""

    def rule(op: Operation, private: Private) -> tuple[Operation, Operation] | None:
        if not isinstance(op, Mul):
            return None
        for value, up in ((op.a, op.b), (op.b, op.a)):
            producer = private.get(value)
            if isinstance(producer, unit):
                operands = {"gate": producer.operand("x"), "up": up}
                return producer, gated.create(operands, {}, [op.result.name])
        return None

    return absorb(graph, rule)


def group_matmuls(graph: Graph, groups: Sequence[Sequence[Matmul]]) -> Graph:
    """Make one matmul_group of the matmuls of each group that read the same value.

    The group stands where its first matmul stood, which is safe: all it reads is there by then.
    Matmuls with a residual stay alone, for what they add may come later.
    """
    position = {op: i for i, op in enumerate(graph.operations)}
    replacement: dict[Operation, Operation] = {}
    absorbed: set[Operation] = set()
    for group in groups:
        alike: dict[object, list[Matmul]] = {}
        for matmul in dict.fromkeys(group):
            if matmul.residual is None and matmul not in absorbed:
                is_block = matmul.weight.type.dtype in BLOCK_FORMATS
                alike.setdefault((matmul.x, is_block), []).append(matmul)
        for members in alike.values():
            if len(members) > 1:
                replacement[min(members, key=position.__getitem__)] = _grouped(members)
                absorbed.update(members)
    operations = [replacement.get(op, op) for op in graph.operations]
    return graph.with_operations([op for op in operations if op not in absorbed])


def _grouped(members: Sequence[Matmul]) -> MatmulGroup:
    operands: dict[str, Value | None] = {"x": members[0].x}
    for i, matmul in enumerate(members):
        operands |= {f"weight{i}": matmul.weight, f"bias{i}": matmul.bias}
    return MatmulGroup.create(operands, {}, [matmul.result.name for matmul in members])

def quantize_operands(graph: Graph, *, once: bool) -> Graph:
    """Put a quantize before each product that reads f32 where its kernel multiplies integers.

    With `once` a value that has been quantized is not quantized again.
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
            if not once or quantized.get(wanted) not in defined:
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
