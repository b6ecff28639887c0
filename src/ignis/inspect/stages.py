"""The graph behind each pass as the page shows it: lines by layer, and what the pass rewrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ignis.graph.ir import Graph, Operation, Value
from ignis.graph.ir.printer import body_lines, print_operation
from ignis.inspect.compilation import Compilation, PassSnapshot
from ignis.inspect.layers import by_layer, layer_of_weight, layers_of, rewrites
from ignis.inspect.report import pass_doc

SHOWN_LAYER = 0


class Lines:
    """Each line once: most look the same in many stages. A barrier belongs to the op before it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[tuple[str, str], int] = {}

    def add(self, text: str, owner: str = "") -> int:
        key = text, "" if "=" in text else owner
        if key not in self._index:
            self._index[key] = len(self.texts)
            self.texts.append(text)
        return self._index[key]

    def block(self, lines: Sequence[str], owner: object) -> list[int]:
        return [self.add(line, str(owner)) for line in lines]


def stages_data(compilation: Compilation, lines: Lines) -> list[dict[str, Any]]:
    """The lowered graph, then that behind each pass."""
    first = {"name": "lowering", "doc": "The plainest graph, straight from the model's tensors.",
             **_graph_data(compilation.naive, lines), "rewrites": [], "n_rewrites": 0}  # fmt: skip
    return [first, *(_stage(snapshot, lines) for snapshot in compilation.passes)]


def _stage(snapshot: PassSnapshot, lines: Lines) -> dict[str, Any]:
    """A graph behind a pass; its rewrites in the layer that is shown in full."""
    name = snapshot.report.name
    found = _changes(snapshot.before, snapshot.after, lines)
    return {
        "name": name, "doc": pass_doc(name), **_graph_data(snapshot.after, lines),
        "rewrites": [change for layers, change in found if SHOWN_LAYER in layers],
        "n_rewrites": len(found),
    }  # fmt: skip


def _graph_data(graph: Graph, lines: Lines) -> dict[str, Any]:
    """`layers`: [layer, indices of its lines, number of its ops]; `weights` of the shown layer."""
    blocks = _blocks(graph)
    by_id = dict(zip(map(id, graph.operations), blocks[1:], strict=True))
    layers: list[tuple[int, list[int], int]] = []
    for layer, ops in by_layer(graph).items():
        indices = [index for op in ops for index in lines.block(by_id[id(op)], op.results[0])]
        layers.append((layer, indices, len(ops)))
    if layers:
        layers[0][1][:0] = lines.block(blocks[0], "inputs")
    shown = [w for w in graph.weights.values() if layer_of_weight(w) == SHOWN_LAYER]
    return {
        "ops": len(graph.operations), "layers": layers,
        "weights": [lines.add(_declared(weight)) for weight in shown],
    }  # fmt: skip


def _blocks(graph: Graph) -> list[list[str]]:
    """The lines of the graph's body; the inputs have one where they are repeated."""
    blocks = body_lines(graph)
    if graph.schedule is not None and graph.schedule.repeated[0]:
        blocks[0] = [f"repeat {', '.join(map(str, graph.inputs))} = embedding", *blocks[0]]
    return blocks


def _declared(weight: Value) -> str:
    return f"{weight}: {weight.type}"


Change = tuple[set[int], list[list[int]]]
"""The layers that a rewrite touches; lines that went and lines that came."""


def _changes(before: Graph, after: Graph, lines: Lines) -> list[Change]:
    """Ops that were replaced; where none was, weights laid out anew and lines put between ops."""
    old, new = (list(map(print_operation, graph.operations)) for graph in (before, after))
    if old != new:
        layer: dict[Operation, int] = {}
        for graph in (before, after):
            layer |= dict(zip(graph.operations, layers_of(graph), strict=True))
        return [
            ({layer[op] for op in (*r.removed, *r.added)},
             [[lines.add(print_operation(op)) for op in side] for side in (r.removed, r.added)])
            for r in rewrites(before, after)
        ]  # fmt: skip
    found: list[Change] = []
    for weight, packed in zip(before.weights.values(), after.weights.values(), strict=True):
        if weight != packed:
            change = [[lines.add(_declared(weight))], [lines.add(_declared(packed))]]
            found.append(({layer_of_weight(weight)}, change))
    layers = (SHOWN_LAYER, *layers_of(after))
    owners = ("inputs", *(op.results[0] for op in after.operations))
    for number, owner, *sides in zip(layers, owners, _blocks(before), _blocks(after), strict=True):
        if sides[0] != sides[1]:
            found.append(({number}, [lines.block(side, owner) for side in sides]))
    return found
