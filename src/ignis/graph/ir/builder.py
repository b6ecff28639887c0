"""Build a graph op by op; each op class is a method of its name.

    b = Builder()
    x = b.input("x", TensorType("f32", ("T", 64)))
    y = b.rmsnorm(x, b.weight("gain", TensorType("f32", (64,))), eps=1e-6)
    graph = b.finish(y)

Operands go in declared order or by name, attributes by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ignis.errors import GraphError
from ignis.graph.ir.graph import Graph
from ignis.graph.ir.operation import AttributeValue, Operation, Value
from ignis.graph.ir.ops import OPS
from ignis.graph.ir.types import TensorType

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


class Builder:
    """Collects operations; results are named `%0`, `%1`, ... in order."""

    def __init__(self) -> None:
        self._inputs: list[Value] = []
        self._operations: list[Operation] = []
        self._n_results = 0

    def input(self, name: str, tensor_type: TensorType) -> Value:
        """Declare an input of the graph."""
        value = Value(_checked_name(name), tensor_type)
        self._inputs.append(value)
        return value

    def weight(self, name: str, tensor_type: TensorType, splat: float | None = None) -> Value:
        """Refer to a GGUF tensor, all of whose elements are `splat` where that is given."""
        return Value(_checked_name(name), tensor_type, True, splat)

    def emit(self, op: type[Operation], *operands: Value | None, **named: object) -> Operation:
        """Append an op: operands in declared order or by name, attributes by name."""
        specs = op.operand_specs
        if len(operands) > len(specs):
            raise GraphError(
                "too many operands", where=op.name, got=len(operands), wanted=len(specs)
            )
        given: dict[str, Value | None] = {}
        attributes: dict[str, AttributeValue] = {}
        for spec, operand in zip(specs, operands, strict=False):
            given[spec.name] = operand
        for name, value in named.items():
            if value is None or isinstance(value, Value):
                given[name] = value
            elif isinstance(value, int | float | str | tuple):
                attributes[name] = value
            else:
                raise GraphError("not an operand or attribute", where=op.name, got=repr(value))
        unnamed = op.unnamed(given, attributes)
        types = unnamed.result_types()
        names = [str(self._n_results + i) for i in range(len(types))]
        created = unnamed.with_results(names, types)
        self._n_results += len(types)
        self._operations.append(created)
        return created

    def __getattr__(self, name: str) -> Callable[..., Value]:
        if name not in OPS:
            raise AttributeError(f"no op is called {name!r}")

        def method(*operands: Value | None, **named: object) -> Value:
            return self.emit(OPS[name], *operands, **named).result

        return method

    def finish(self, *outputs: Value) -> Graph:
        """The graph with these outputs."""
        return Graph(tuple(self._inputs), tuple(self._operations), outputs)


def _checked_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise GraphError("not a name", got=repr(name), wanted="letters, digits and _ . -")
    return name
