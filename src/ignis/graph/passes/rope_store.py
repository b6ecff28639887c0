"""Rope and the KV store become one op in front of attention."""

from __future__ import annotations

from ignis.graph.ir import Graph, Operation
from ignis.graph.ir.ops import Attend, Attention, Rope, RopeStore


def rope_store(graph: Graph) -> Graph:
    """Fuse the ropes of q and k with the store of keys and values; attention only attends.

        %3 = rope(%0) {style = "neox", head_dim = 32, n_rot = 32, base = 10000.0} : f32[T,64]
        %4 = rope(%1) {style = "neox", head_dim = 32, n_rot = 32, base = 10000.0} : f32[T,32]
        %5 = attention(%3, %4, %2) {layer = 0, n_heads = 2, n_kv_heads = 1, ...} : f32[T,64]

    becomes

        %3 = rope_store(%0, %1, %2) {layer = 0, style = "neox", ...} : f32[T,64]
        %5 = attend(%3) {layer = 0, n_heads = 2, n_kv_heads = 1, ...} : f32[T,64]

    The rotated keys go straight to the cache, in the same bits; they are no value any more.
    Only ropes that turn alike, and that nothing else reads, are fused.
    """
    operations: list[Operation] = []
    absorbed: set[Operation] = set()
    for op in graph.operations:
        ropes = _ropes(graph, op) if isinstance(op, Attention) else None
        if ropes is None or not isinstance(op, Attention):
            operations.append(op)
            continue
        absorbed.update(ropes)
        turn_q, turn_k = ropes
        operands = {"q": turn_q.x, "k": turn_k.x, "v": op.v, "factors": turn_q.factors}
        attributes = {"layer": op.layer, **turn_q.attributes}
        if op.kv_type is not None:
            attributes["kv_type"] = op.kv_type
        store = RopeStore.create(operands, attributes, [turn_q.result.name])
        names = [spec.name for spec in Attend.attribute_specs]
        kept = {name: op.attributes[name] for name in names if name in op.attributes}
        operations += [store, Attend.create({"q": store.result}, kept, [op.result.name])]
    return graph.with_operations([op for op in operations if op not in absorbed])


def _ropes(graph: Graph, op: Attention) -> tuple[Rope, Rope] | None:
    """The ropes of q and k, if they can be fused with this attention."""
    turn_q, turn_k = graph.producers.get(op.q), graph.producers.get(op.k)
    if not isinstance(turn_q, Rope) or not isinstance(turn_k, Rope):
        return None
    alike = (turn_q.attributes, turn_q.factors) == (turn_k.attributes, turn_k.factors)
    private = graph.use_counts[op.q] == 1 == graph.use_counts[op.k]
    known = {spec.name for spec in Attend.attribute_specs}
    return (turn_q, turn_k) if alike and private and known >= set(op.attributes) else None
