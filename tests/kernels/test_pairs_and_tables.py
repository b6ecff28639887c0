"""`dot2` and `lookup`: the scales of half blocks and the codebooks rest on them."""

from __future__ import annotations

import numpy as np
import pytest

from ignis.errors import KernelError
from ignis.gguf.codebooks import IQ4_VALUES
from ignis.kernels.lang import Builder, Value, i8, i16, i32, kernel, ptr
from ignis.native import lookup
from tests.kernels.helpers import run, run_everywhere


@kernel(a=ptr, b=ptr, y=ptr)
def _dot2(
    k: Builder, *, a: Value, b: Value, y: Value, begin: Value, end: Value, scratch: Value
) -> None:  # fmt: skip
    for i in k.range(begin, end):
        place = y.at(i * 64)
        u, v = (x.at(i * 64).load(i16.x(32)) for x in (a, b))
        place.store(k.dot2(place.load(i32.x(16)), u, v))


@kernel(a=ptr, y=ptr)
def _lookup(
    k: Builder, *, a: Value, y: Value, begin: Value, end: Value, scratch: Value, lanes: int,
    tree: bool,
) -> None:  # fmt: skip
    for i in k.range(begin, end):
        indices = a.at(i * lanes).load(i8.x(lanes))
        if tree:
            y.at(i * lanes).store(lookup._choose(k, IQ4_VALUES, indices, bit=3))
        else:
            y.at(i * lanes).store(k.lookup(IQ4_VALUES, indices))


def test_dot2_is_exact_modulo_two_to_the_32() -> None:
    """Two products of -32768 by -32768 are the one sum that does not fit."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-(2**15), 2**15, (8, 32)).astype(np.int16) for _ in range(2))
    a[0] = b[0] = -(2**15)
    acc = rng.integers(-(2**31), 2**31, (8, 16)).astype(np.int32)
    products = (a.astype(np.int64) * b).reshape(8, 16, 2).sum(-1)
    got = run_everywhere(_dot2(), {"a": a, "b": b, "y": acc}, 8)
    np.testing.assert_array_equal(got, (acc + products).astype(np.int32))


@pytest.mark.parametrize("lanes", [16, 64])
def test_lookup_finds_every_entry(lanes: int) -> None:
    indices = np.random.default_rng(2).permutation(np.arange(512) % 16).astype(np.uint8)
    args = {"a": indices, "y": np.zeros(512, np.int8)}
    got = run_everywhere(_lookup(lanes=lanes, tree=False), args, 512 // lanes)
    np.testing.assert_array_equal(got, np.array(IQ4_VALUES, np.int8)[indices])
    # What processors without a byte shuffle do.
    tree = run(_lookup(lanes=lanes, tree=True), "host", args, 512 // lanes, ["y"])["y"]
    np.testing.assert_array_equal(tree, got)


def test_lookup_refuses_an_index_past_the_table() -> None:
    args = {"a": np.full(16, 16, np.uint8), "y": np.zeros(16, np.int8)}
    with pytest.raises(KernelError, match="an index leaves the table: got 16"):
        run(_lookup(lanes=16, tree=False), "eager", args, 1, ["y"])
