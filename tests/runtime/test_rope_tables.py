"""The rope table grows with the sequences; a row must not depend on when it was computed."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from ignis.graph.ir.rope import rope_frequencies, rope_table
from ignis.runtime.rope_tables import RopeTable


def rows(table: RopeTable, n: int, n_rot: int) -> np.ndarray:
    """Read it as a kernel does: f32 [position][cosine, sine][n_rot/2] behind the address."""
    flat = (ctypes.c_float * (n * n_rot)).from_address(table.address)
    return np.frombuffer(flat, np.float32).reshape(n, 2, n_rot // 2).copy()


@pytest.mark.parametrize("factors", [None, np.linspace(1, 8, 16)])
def test_rows_do_not_depend_on_how_the_table_grew(factors: np.ndarray | None) -> None:
    n_ctx = 1000
    table = RopeTable(10000.0, 32, factors, n_ctx)
    address = table.address
    for n in (1, 3, 256, 257, 900, 20, n_ctx):
        table.reserve(n)
    assert table.address == address  # compiled plans hold it
    wanted = rope_table(np.arange(n_ctx), rope_frequencies(10000.0, 32, factors))
    got = rows(table, n_ctx, 32)
    assert np.array_equal(got[:, 0], wanted[0]) and np.array_equal(got[:, 1], wanted[1])


def test_against_float64() -> None:
    table = RopeTable(1e6, 64, None, 300)
    table.reserve(300)
    angles = np.arange(300)[:, None] * 1e6 ** (-np.arange(32) / 32)
    got = rows(table, 300, 64)
    assert np.abs(got[:, 0] - np.cos(angles)).max() < 2**-24
    assert np.abs(got[:, 1] - np.sin(angles)).max() < 2**-24


def test_the_last_block_of_a_context_may_be_short() -> None:
    table = RopeTable(10000.0, 8, None, 1)
    table.reserve(1)
    assert rows(table, 1, 8)[0].tolist() == [[1.0] * 4, [0.0] * 4]
