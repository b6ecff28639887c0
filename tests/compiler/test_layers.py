"""Ops sorted by layer, rewrites by place: what the dumps and the page fold and step through."""

from __future__ import annotations

import pytest

from ignis.inspect import Compilation, inspect_graph
from ignis.inspect.layers import OUTPUT, by_layer, rewrites
from tests.graph.qwen_shape import QWEN2_05B, qwen2_graph


@pytest.fixture(scope="module")
def qwen() -> Compilation:
    return inspect_graph(QWEN2_05B, qwen2_graph(), "q8_0")


def test_every_op_is_in_its_layer(qwen: Compilation) -> None:
    """24 layers alike, at every stage; norm and logits behind them."""
    for graph in (qwen.naive, *(snapshot.after for snapshot in qwen.passes)):
        layers = by_layer(graph)
        assert list(layers) == [*range(24), OUTPUT]
        assert len({tuple(op.kind for op in layers[i]) for i in range(24)}) == 1
    assert [len(ops) for ops in by_layer(qwen.naive).values()] == [18] * 24 + [3]
    assert [len(ops) for ops in by_layer(qwen.graph).values()] == [13] * 24 + [3]


WANTED = {  # places, and ops removed and added at the first
    "dead_code": (0, ()), "common_subexpressions": (0, ()), "fold_constants": (0, ()),
    "fuse_norm": (49, (2, 1)), "fuse_swiglu": (24, (2, 1)), "fuse_residual": (48, (2, 1)),
    "rope_store": (24, (3, 2)), "quantize_activations": (97, (3, 4)), "fuse_qkv": (24, (3, 1)),
    "legalize_activations": (0, ()),
    "fuse_gate_up": (24, (2, 1)), "fuse_geglu": (0, ()), "layout": (97, (1, 1)),
    "schedule_steps": (0, ()),
}  # fmt: skip


def test_rewrites_are_told_apart(qwen: Compilation) -> None:
    for snapshot in qwen.passes:
        found = rewrites(snapshot.before, snapshot.after)
        n_places, sizes = WANTED[snapshot.report.name]
        assert len(found) == n_places, snapshot.report.name
        if found:
            assert (len(found[0].removed), len(found[0].added)) == sizes
