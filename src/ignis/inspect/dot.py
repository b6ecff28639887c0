"""A graph as Graphviz source: one cluster a layer, weights inside their op."""

from __future__ import annotations

import json

from ignis.graph.ir import Graph, Operation
from ignis.inspect.layers import OUTPUT, by_layer

_COLOURS = {
    "matmul": "#cfe3fb", "matmul_group": "#cfe3fb", "logits": "#cfe3fb",
    "attention": "#fbe3c4", "attend": "#fbe3c4", "rope_store": "#fbe3c4", "rope": "#fbe3c4",
    "quantize": "#e4d7f7",
}  # fmt: skip
_OTHERS = "#dff0d8"


def dot(graph: Graph) -> str:
    """The graph in the DOT language: `ignis compile MODEL --dot | dot -Tsvg > graph.svg`."""
    lines = ["digraph model {", "  rankdir=TB;", '  node [shape=box, style="rounded,filled",'
             ' fontname="monospace", fontsize=10];', '  edge [fontname="monospace", fontsize=8];']
    lines += [f"  {_quoted(f'%{v.name}')} [fillcolor=white, label={_quoted(f'{v}: {v.type}')}];"
              for v in graph.inputs]
    names = {op: f"op{i}" for i, op in enumerate(graph.operations)}
    for layer, ops in by_layer(graph).items():
        title = "output" if layer == OUTPUT else f"layer {layer}"
        lines.append(f'  subgraph "cluster_{title}" {{ label="{title}"; fontname="monospace";')
        lines += [f"    {names[op]} [fillcolor={_quoted(_COLOURS.get(op.name, _OTHERS))}, "
                  f"label={_quoted(_label(op))}];" for op in ops]
        lines.append("  }")
    for op in graph.operations:
        for value in dict.fromkeys(v for v in op.operands if not v.is_weight):
            producer = graph.producers.get(value)
            source = _quoted(str(value)) if producer is None else names[producer]
            lines.append(f"  {source} -> {names[op]} [label={_quoted(str(value.type))}];")
    return "\n".join([*lines, "}", ""])


def _label(op: Operation) -> str:
    weights = [value.name for value in op.operands if value.is_weight]
    return "\n".join([op.kind, *weights])


def _quoted(text: str) -> str:
    return json.dumps(text)
