"""Which layer an op belongs to, and what a pass replaced by what."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ignis.graph.ir import Graph, Operation, Value

_BLOCK = re.compile(r"blk\.(\d+)\.")
OUTPUT = -1
"""The layer of what stands behind all layers: the last norm and the logits."""


def layers_of(graph: Graph) -> tuple[int, ...]:
    """The layer of each operation, by the names of its weights or by its neighbours.

    An op without weights belongs to the layer of those who read it, if it has one operand and they
    all name a layer (a norm, a quantize), else to the last layer among its operands' producers.
    """
    named = {op: _named_layer(op) for op in graph.operations}
    readers: dict[Value, list[Operation]] = {}
    for op in graph.operations:
        for value in op.operands:
            readers.setdefault(value, []).append(op)
    layer_of_value: dict[Value, int] = {}
    layers: list[int] = []
    for op in graph.operations:
        layer = named[op]
        if layer is None:
            following = [named[reader] for r in op.results for reader in readers.get(r, ())]
            known = [n for n in following if n is not None]
            if known and len(known) == len(following) and len(op.operands) == 1:
                layer = OUTPUT if set(known) == {OUTPUT} else min(n for n in known if n >= 0)
            else:
                layer = max((layer_of_value.get(v, 0) for v in op.operands), default=0)
        layer_of_value |= dict.fromkeys(op.results, layer)
        layers.append(layer)
    return tuple(layers)


def _named_layer(op: Operation) -> int | None:
    """The layer that an op's weights or attributes name; `OUTPUT` for weights of no layer."""
    if isinstance(layer := op.attributes.get("layer"), int):
        return layer
    weights = [value for value in op.operands if value.is_weight]
    for weight in weights:
        if (layer := layer_of_weight(weight)) != OUTPUT:
            return layer
    if any(weight.name.startswith("output") or op.name == "logits" for weight in weights):
        return OUTPUT
    return None


def layer_of_weight(weight: Value) -> int:
    """The layer that a weight's name tells, or `OUTPUT`."""
    match = _BLOCK.match(weight.name)
    return OUTPUT if match is None else int(match[1])


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Operations that a pass took away, and those that stand in their place."""

    removed: tuple[Operation, ...]
    added: tuple[Operation, ...]


def rewrites(before: Graph, after: Graph) -> list[Rewrite]:
    """What changed between two graphs, one entry for each place, in the order of the program.

    Changed ops belong together if they define the same value, if one reads a value of another that
    exists on one side only, or if one reads what the other no longer does.
    """
    kept = set(before.operations) & set(after.operations)
    removed = [op for op in before.operations if op not in kept]
    added = [op for op in after.operations if op not in kept]
    only = set(before.values) ^ set(after.values)
    groups = _Groups([*removed, *added])
    for ops in (removed, added):
        defined = {value: op for op in ops for value in op.results}
        for op in ops:
            for value in op.operands:
                if value in defined and value in only:
                    groups.join(op, defined[value])
    names = {value.name: op for op in removed for value in op.results}
    for op in added:
        for value in op.results:
            if value.name in names:
                groups.join(op, names[value.name])
    new_readers: dict[Value, list[Operation]] = {}
    for op in added:
        for value in op.operands:
            new_readers.setdefault(value, []).append(op)
    for op in removed:
        heirs = {after.producers.get(value) for value in op.results}
        for value in op.operands:
            readers = new_readers.get(value, [])
            if not value.is_weight and heirs.isdisjoint(readers):
                for reader in readers:
                    groups.join(op, reader)
    found: dict[Operation, tuple[list[Operation], list[Operation]]] = {}
    for side, ops in enumerate((removed, added)):
        for op in ops:
            found.setdefault(groups.leader(op), ([], []))[side].append(op)
    return [Rewrite(tuple(old), tuple(new)) for old, new in found.values()]


class _Groups:
    """Disjoint sets of operations."""

    def __init__(self, ops: Sequence[Operation]) -> None:
        self._leader: dict[Operation, Operation] = {op: op for op in ops}

    def leader(self, op: Operation) -> Operation:
        while self._leader[op] is not op:
            op = self._leader[op]
        return op

    def join(self, a: Operation, b: Operation) -> None:
        self._leader[self.leader(b)] = self.leader(a)


def by_layer(graph: Graph) -> Mapping[int, list[Operation]]:
    """The operations of each layer, in the order of the program."""
    found: dict[int, list[Operation]] = {}
    for op, layer in zip(graph.operations, layers_of(graph), strict=True):
        found.setdefault(layer, []).append(op)
    return found
