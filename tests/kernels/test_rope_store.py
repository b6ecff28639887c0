"""Rope and KV store in one kernel: the bits of the two kernels it replaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ignis.kernels.kv_pages import kv_store, page_nbytes
from ignis.kernels.rope import rope
from ignis.kernels.rope_store import rope_store, rope_store_scratch_nbytes
from tests.kernels.helpers import assert_same_bits, levels, run

N_TOKENS, PER_SLOT = 5, 2


def _case(head_dim: int, n_rot: int, n_heads: int, n_kv_heads: int) -> dict[str, Any]:
    """Tokens of two slots; pages that no one wrote are NaN."""
    rng = np.random.default_rng(head_dim)
    q, k, v = (
        rng.standard_normal((N_TOKENS, n * head_dim)).astype(np.float32)
        for n in (n_heads, n_kv_heads, n_kv_heads)
    )
    n_pages = 2 * PER_SLOT + 1
    return {
        "q": q, "k": k, "v": v, "y": np.zeros_like(q), "n_heads": n_heads,
        "n_kv_heads": n_kv_heads, "n_pages": n_pages, "pages_per_slot": PER_SLOT,
        "table": rng.standard_normal((32, n_rot)).astype(np.float32),
        "base": np.full(n_kv_heads * n_pages * page_nbytes(head_dim), 0xFF, np.uint8),
        "pages": rng.permutation(n_pages)[: 2 * PER_SLOT].astype(np.int32).reshape(2, PER_SLOT),
        "positions": np.array([0, 16, 17, 1, 31], np.int32),
        "slots": np.array([0, 0, 0, 1, 1], np.int32),
    }  # fmt: skip


@pytest.mark.parametrize("style", ["neox", "interleaved"])
@pytest.mark.parametrize(("head_dim", "n_rot"), [(16, 16), (32, 20), (64, 64), (80, 36)])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(1, 1), (6, 2)])
def test_equals_rope_and_kv_store(
    head_dim: int, n_rot: int, style: str, n_heads: int, n_kv_heads: int
) -> None:
    """On every level and on the twin; rotating in place gives the same."""
    case = _case(head_dim, n_rot, n_heads, n_kv_heads)
    turn = rope(head_dim=head_dim, n_rot=n_rot, style=style)

    def rotated(x: Any, n: int) -> Any:
        args = {**case, "x": x, "y": np.zeros_like(x), "n": n * head_dim}
        return run(turn, "host", args, N_TOKENS, ["y"])["y"]

    stored = {**case, "k": rotated(case["k"], n_kv_heads)}
    base = run(kv_store(head_dim=head_dim), "host", stored, N_TOKENS, ["base"])["base"]
    kernel = rope_store(head_dim=head_dim, n_rot=n_rot, style=style)
    scratch = rope_store_scratch_nbytes(head_dim)
    for level in ("eager", *levels()):
        got = run(kernel, level, case, N_TOKENS, ["y", "base"], scratch)
        assert_same_bits(got["y"], rotated(case["q"], n_heads), f"q on {level}")
        assert_same_bits(got["base"], base, f"the cache on {level}")
    in_place = {**case, "y": case["q"]}
    got = run(kernel, "host", in_place, N_TOKENS, ["y", "base"], scratch)
    assert_same_bits(got["y"], rotated(case["q"], n_heads), "q in place")
