"""The textual form of a graph; `parse_graph` reads it back to an equal graph.

    graph(%x: f32[T,64]) {
      weights {
        @output_norm.weight: f32[64]
      }
      %0 = rmsnorm(%x, @output_norm.weight) {eps = 1e-06} : f32[T,64]
      return %0
    }

Optional operands are written with their names: `matmul(%0, @w, bias=@b)`. A weight whose elements
are known to be one number is declared with it: `@gain: f32[64] = 1.0`. Numbers print so that they
read back to the same bits.

Once steps are scheduled, `barrier` stands where threads meet, and `repeat` before what every
thread does for itself in a step of one token. An op of two stages has a line for the second:

    repeat %1 = attention(%q, %k, %v) {layer = 0, ...} : f32[T,64]
    barrier if T > 1
    then %1
    barrier
"""

from __future__ import annotations

import json

from ignis.graph.ir.graph import Graph
from ignis.graph.ir.operation import AttributeValue, Operation, Value


def print_graph(graph: Graph) -> str:
    """The graph as text, one operation a line, each with its result type."""
    repeat = "repeat " if graph.schedule is not None and graph.schedule.repeated[0] else ""
    lines = [f"graph({repeat}{', '.join(map(_typed, graph.inputs))}) {{"]
    if graph.weights:
        lines.append("  weights {")
        lines += [f"    {_typed(weight)}" for weight in graph.weights.values()]
        lines.append("  }")
    lines += [f"  {line}" for block in body_lines(graph) for line in block]
    lines.append(f"  return {', '.join(map(str, graph.outputs))}")
    return "\n".join([*lines, "}", ""])


def body_lines(graph: Graph) -> list[list[str]]:
    """What stands between weights and return: a list of lines behind the inputs, then one for each
    operation, with the barriers that follow it."""
    schedule = graph.schedule
    if schedule is None:
        return [[], *([print_operation(op)] for op in graph.operations)]
    entries = zip(schedule.repeated, schedule.meet_one, schedule.meet_many, strict=True)
    _, *barriers = next(entries)
    blocks = [_barrier(*barriers)]
    for op in graph.operations:
        block: list[str] = []
        for _ in op.stages:
            repeated, *barriers = next(entries)
            what = print_operation(op) if not block else f"then {op.results[0]}"
            block += ["repeat " * repeated + what, *_barrier(*barriers)]
        blocks.append(block)
    return blocks


def _barrier(one: bool, many: bool) -> list[str]:
    if one and many:
        return ["barrier"]
    return ["barrier if T = 1"] * one + ["barrier if T > 1"] * many


def print_operation(op: Operation) -> str:
    """One line: `%5 = rmsnorm(%4, @blk.0.attn_norm.weight) {eps = 1e-06} : f32[T,896]`."""
    operands = [
        f"{spec.name}={value}" if spec.optional else str(value)
        for spec, value in zip(op.operand_specs, op.arguments, strict=True)
        if value is not None
    ]
    results = ", ".join(map(str, op.results))
    types = ", ".join(str(result.type) for result in op.results)
    attributes = ", ".join(f"{name} = {_literal(v)}" for name, v in op.attributes.items())
    braces = f" {{{attributes}}}" if attributes else ""
    return f"{results} = {op.name}({', '.join(operands)}){braces} : {types}"


def _typed(value: Value) -> str:
    known = "" if value.splat is None else f" = {value.splat!r}"
    return f"{value}: {value.type}{known}"


def _literal(value: AttributeValue) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
