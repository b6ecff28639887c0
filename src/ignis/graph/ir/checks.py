"""What ops ask of their operands' types."""

from __future__ import annotations

from ignis.errors import GraphError
from ignis.graph.ir.operation import Operation, Value
from ignis.graph.ir.types import Dim, TensorType


def matrix(op: Operation, value: Value) -> tuple[Dim, int]:
    """The rows (often symbolic) and the width of a two-dimensional activation."""
    shape = value.type.shape
    if len(shape) != 2 or not isinstance(shape[1], int):
        raise GraphError(
            "an operand is not a matrix of fixed width",
            where=op.name,
            got=f"{value}: {value.type}",
            wanted=f"{value.type.dtype}[T,D]",
        )
    return shape[0], shape[1]


def expect(op: Operation, name: str, value: Value, wanted: TensorType) -> None:
    if value.type != wanted:
        raise GraphError(
            f"operand '{name}' does not fit",
            where=op.name,
            got=f"{value}: {value.type}",
            wanted=wanted,
        )
