"""The graph IR: values, types, ops, builder, printer, parser, verifier."""

from ignis.graph.ir.builder import Builder
from ignis.graph.ir.graph import Graph
from ignis.graph.ir.operation import Attribute, Operand, Operation, OptionalOperand, Value
from ignis.graph.ir.ops import OPS
from ignis.graph.ir.parser import parse_graph
from ignis.graph.ir.printer import print_graph
from ignis.graph.ir.types import TensorType, a8_nbytes
from ignis.graph.ir.verifier import verify

__all__ = [
    "OPS",
    "Attribute",
    "Builder",
    "Graph",
    "Operand",
    "Operation",
    "OptionalOperand",
    "TensorType",
    "Value",
    "a8_nbytes",
    "parse_graph",
    "print_graph",
    "verify",
]
