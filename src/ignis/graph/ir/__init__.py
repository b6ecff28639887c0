"""The graph IR: values, types, ops, builder, printer, parser, verifier.

The parser is imported on first use (PEP 562): to run a model nothing is parsed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ignis.graph.ir.builder import Builder
from ignis.graph.ir.graph import Graph
from ignis.graph.ir.operation import Attribute, Operand, Operation, OptionalOperand, Value
from ignis.graph.ir.ops import OPS
from ignis.graph.ir.printer import print_graph
from ignis.graph.ir.types import TensorType, a8_nbytes
from ignis.graph.ir.verifier import verify

if TYPE_CHECKING:
    from ignis.graph.ir.parser import parse_graph

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


def __getattr__(name: str) -> Any:
    if name == "parse_graph":
        from ignis.graph.ir.parser import parse_graph

        return parse_graph
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
