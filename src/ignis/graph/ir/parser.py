"""Read the textual form back. Errors name the line, what was got and what was wanted."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ignis.errors import GraphError
from ignis.graph.ir.graph import Graph
from ignis.graph.ir.operation import AttributeValue, Operation, Value
from ignis.graph.ir.ops import OPS
from ignis.graph.ir.schedule import Schedule
from ignis.graph.ir.types import TensorType
from ignis.graph.ir.verifier import verify

_ID = r"[%@][A-Za-z0-9_][A-Za-z0-9_.\-]*"
_HEADER = re.compile(r"graph\((.*)\) \{")
_TYPED = re.compile(rf"({_ID})\s*:\s*([^=]+?)(?:\s*=\s*(.+))?")
_OPERATION = re.compile(
    rf"(?P<results>{_ID}(?:, {_ID})*) = (?P<op>\w+)\((?P<operands>[^)]*)\)"
    r"(?: \{(?P<attributes>.*)\})? : (?P<types>.+)"
)
_OPERAND = re.compile(rf"(?:(\w+)=)?({_ID})")
_ATTRIBUTE = re.compile(r'\s*(\w+) = ("(?:[^"\\]|\\.)*"|\([^)]*\)|[^,]+)\s*(?:,|$)')
_COMMA_OUTSIDE_BRACKETS = re.compile(r",\s*(?![^\[]*\])")


_BARRIERS = {"barrier": (True, True), "barrier if T = 1": (True, False),
             "barrier if T > 1": (False, True)}  # fmt: skip


@dataclass(slots=True)
class _Stage:
    """A stage as read: its op (None for the inputs), and where threads meet behind it."""

    op: Operation | None
    repeated: bool
    meets: tuple[bool, bool] = (False, False)  # in steps of one token, of several


def parse_graph(text: str) -> Graph:
    """The graph that `print_graph` wrote; `#` starts a comment. Verified, or GraphError."""
    parser = _Parser(text)
    graph = parser.graph()
    try:
        verify(graph)
    except GraphError as error:
        raise GraphError(f"line {parser.line_of(error.where)}: {error}") from None
    return graph


class _Parser:
    def __init__(self, text: str) -> None:
        self._lines = _significant(text)
        self._where = "line 1"
        self._number = 1
        self._line_of: dict[str, int] = {}  # of values, weights and operations
        self._values: dict[str, Value] = {}
        self._n_operations = 0
        self._stages: list[_Stage] = []  # the inputs' first, then one a line of the body

    def graph(self) -> Graph:
        header = self._match(_HEADER, self._next(), "graph(%x: f32[T,D]) {")
        declared = header[1].removeprefix("repeat ")
        inputs = tuple(self._declare(part) for part in _split(declared))
        self._stages.append(_Stage(None, declared != header[1]))
        operations: list[Operation] = []
        line = self._next()
        if line == "weights {":
            while (line := self._next()) != "}":
                self._declare(line)
            line = self._next()
        while not line.startswith("return"):
            if line.startswith("barrier"):
                self._barrier(line)
            elif (op := self._stage(line)) is not None:
                operations.append(op)
            line = self._next()
        self._line_of["return"] = self._number
        outputs = tuple(self._use(name) for name in _split(line.removeprefix("return")))
        if (line := self._next()) != "}":
            raise self._error("the graph does not end after its return", line, "}")
        for number, extra in self._lines:
            raise GraphError(
                "text after the graph", where=f"line {number}", got=extra, wanted="nothing"
            )
        graph = Graph(inputs, tuple(operations), outputs, self._schedule())
        for name, value in self._values.items():
            if value.is_weight and value.name not in graph.weights:
                raise GraphError("a weight is declared but never read",
                                 where=f"line {self._line_of[name]}", got=name)  # fmt: skip
        return graph

    def line_of(self, what: object) -> int:
        """The line of what an error of the verifier is about; else of the return."""
        return self._line_of.get(str(what), self._line_of["return"])

    def _stage(self, line: str) -> Operation | None:
        """The operation of a line, or None for a further stage of the one before."""
        rest = line.removeprefix("repeat ")
        op: Operation | None = None
        if not rest.startswith("then "):
            op = self._operation(rest)
        elif (before := self._stages[-1].op) is None or rest != f"then {before.results[0]}":
            wanted = "another op" if before is None else f"then {before.results[0]}"
            raise self._error("a stage does not follow its op", rest, wanted)
        self._stages.append(_Stage(op or self._stages[-1].op, rest != line))
        return op

    def _barrier(self, line: str) -> None:
        meets = _BARRIERS.get(line)
        if meets is None:
            raise self._error("no such barrier", line, " or ".join(_BARRIERS))
        if any(self._stages[-1].meets):
            raise self._error("two barriers in a row", line, "one, or an op in between")
        self._stages[-1].meets = meets

    def _schedule(self) -> Schedule | None:
        """What the lines say of barriers and repeated work; None if they say nothing."""
        if not any(stage.repeated or any(stage.meets) for stage in self._stages):
            return None
        one, many = zip(*(stage.meets for stage in self._stages), strict=True)
        return Schedule(tuple(stage.repeated for stage in self._stages), one, many)

    def _operation(self, line: str) -> Operation:
        match = self._match(_OPERATION, line, "%r = op(%a, @b) {name = value} : type")
        op = OPS.get(match["op"])
        if op is None:
            raise self._error("unknown op", match["op"], ", ".join(OPS))
        names = match["results"].split(", ")
        for name in names:
            if name in self._values or name.startswith("@"):
                raise self._error("a value is defined twice", name, "a new %name")
        operands = self._operands(op, match["operands"])
        attributes = self._attributes(match["attributes"] or "")
        try:
            created = op.create(operands, attributes, [name[1:] for name in names])
            types = [TensorType.parse(part) for part in _split(match["types"])]
        except GraphError as error:
            raise GraphError(f"{self._where}: {error}") from None
        inferred = [result.type for result in created.results]
        if types != inferred:
            raise self._error("the result has another type", match["types"], _joined(inferred))
        self._line_of |= dict.fromkeys(names, self._number)
        self._line_of[f"operation {self._n_operations}, {created.name}"] = self._number
        self._n_operations += 1
        self._values |= dict(zip(names, created.results, strict=True))
        return created

    def _operands(self, op: type[Operation], text: str) -> dict[str, Value | None]:
        required = [spec.name for spec in op.operand_specs if not spec.optional]
        operands: dict[str, Value | None] = {}
        for i, part in enumerate(_split(text)):
            match = self._match(_OPERAND, part, "%value, @weight or name=%value")
            if match[1] is None and i >= len(required):
                wanted = f"{len(required)}, optional ones by name"
                raise self._error(f"too many operands of {op.name}", i + 1, wanted)
            name = match[1] or required[i]
            if name in operands:
                raise self._error("an operand is given twice", name, "once")
            operands[name] = self._use(match[2])
        return operands

    def _attributes(self, text: str) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {}
        at = 0
        while at < len(text):
            match = _ATTRIBUTE.match(text, at)
            if match is None:
                raise self._error("bad attributes", text[at:].strip(), "name = value, ...")
            if match[1] in attributes:
                raise self._error("an attribute is given twice", match[1], "once")
            attributes[match[1]] = self._literal(match[2])
            at = match.end()
        return attributes

    def _literal(self, text: str) -> AttributeValue:
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
        if isinstance(value, bool) or not isinstance(value, int | float | str | tuple):
            raise self._error("bad attribute value", text, "a number, a string or a tuple")
        return value

    def _declare(self, text: str) -> Value:
        match = self._match(_TYPED, text, "%name: type or @name: type")
        name = match[1]
        if name in self._values:
            raise self._error("a value is declared twice", name, "a new name")
        try:
            type_ = TensorType.parse(match[2])
        except GraphError as error:
            raise GraphError(f"{self._where}: {error}") from None
        is_weight = name.startswith("@")
        splat = self._splat(match[3], is_weight)
        self._line_of[name] = self._number
        self._values[name] = Value(name[1:], type_, is_weight, splat)
        return self._values[name]

    def _splat(self, text: str | None, is_weight: bool) -> float | None:
        if text is None:
            return None
        value = self._literal(text)
        if not is_weight or not isinstance(value, float) or not math.isfinite(value):
            raise self._error("no such constant", text, "a finite number for a weight, as in 1.0")
        return value

    def _use(self, name: str) -> Value:
        if name not in self._values:
            raise self._error("a value is not defined before its use", name, "a defined value")
        return self._values[name]

    def _next(self) -> str:
        for number, line in self._lines:
            self._where, self._number = f"line {number}", number
            return line
        raise self._error("the text ends too early", "end of text", "return and }")

    def _match(self, pattern: re.Pattern[str], text: str, wanted: str) -> re.Match[str]:
        match = pattern.fullmatch(text.strip())
        if match is None:
            raise self._error("cannot be read", repr(text), wanted)
        return match

    def _error(self, what: str, got: object, wanted: object) -> GraphError:
        return GraphError(what, where=self._where, got=got, wanted=wanted)


def _significant(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.partition("#")[0].strip()
        if stripped:
            yield number, stripped


def _split(text: str) -> list[str]:
    return _COMMA_OUTSIDE_BRACKETS.split(text.strip()) if text.strip() else []


def _joined(types: list[TensorType]) -> str:
    return ", ".join(map(str, types))
