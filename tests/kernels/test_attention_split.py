"""Attention of one token, cut at segments: the bits of the kernel that walks them in one go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ignis.kernels.attention_split import (
    attend_split,
    attend_split_scratch_nbytes,
    max_segments,
    partials_nbytes,
)
from tests.kernels.helpers import assert_same_bits, run, run_everywhere
from tests.kernels.test_attention import Cache, _attend


def _split(case: dict[str, Any], position: int, head_dim: int) -> dict[str, Any]:
    n_heads = case["n_heads"]
    return {
        **case,
        "partials": np.full(partials_nbytes(n_heads, 1024, head_dim) // 4, np.nan, np.float32),
        "arrived": np.zeros(n_heads, np.int64),
        "n_segments": position // 256 + 1,
        "max_segments": max_segments(1024),
    }


@pytest.mark.parametrize("position", [0, 15, 16, 255, 256, 300, 511, 512, 800])
def test_equals_the_kernel_that_is_not_cut(position: int) -> None:
    """However many segments there are, and whichever order they are done in."""
    cache = Cache.filled(position + 5, 2, 32, seed=position)
    case = cache.case(6, [(1, position)], 0.3)
    wanted = _attend(cache, case, 3)
    for group in (1, 3):
        kernel = attend_split(head_dim=32, group=group, kv_type="f16")
        args = _split(case, position, 32)
        units = 6 // group * args["n_segments"]
        scratch = attend_split_scratch_nbytes(group)
        whole = run(kernel, "host", args, units, ["y", "arrived"], scratch)
        assert_same_bits(whole["y"], wanted, f"position {position}")
        assert not whole["arrived"].any(), "the next step would wait for ever"
        if args["n_segments"] > 1:
            later = run(kernel, "host", args, units, ["y", "partials", "arrived"], scratch, begin=1)
            args |= {name: later[name] for name in ("y", "partials", "arrived")}
            got = run(kernel, "host", args, 1, ["y"], scratch)["y"]
            assert_same_bits(got, wanted, f"position {position}, segments out of order")


@pytest.mark.parametrize("window", [1, 30, 256, 257, 700])
@pytest.mark.parametrize("position", [10, 255, 256, 800])
def test_windows_equal_the_kernel_that_is_not_cut(position: int, window: int) -> None:
    """Segments before the window are neither computed nor merged."""
    cache = Cache.filled(position + 5, 2, 32, seed=position)
    case = cache.case(4, [(1, position)], 0.3)
    static = {"window": window, "softcap": 4.0}
    wanted = _attend(cache, case, 2, **static)
    kernel = attend_split(head_dim=32, group=2, kv_type="f16", **static)
    args = _split(case, position, 32)
    units, scratch = 2 * args["n_segments"], attend_split_scratch_nbytes(2)
    got = run(kernel, "host", args, units, ["y", "arrived"], scratch)
    assert_same_bits(got["y"], wanted, f"position {position}, window {window}")
    assert not got["arrived"].any()


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
def test_other_types_equal_the_kernel_that_is_not_cut(kv_type: str) -> None:
    cache = Cache.filled(310, 2, 64, kv_type=kv_type)
    case = cache.case(6, [(1, 300)], 0.3)
    args, scratch = _split(case, 300, 64), attend_split_scratch_nbytes(3)
    kernel = attend_split(head_dim=64, group=3, kv_type=kv_type)
    got = run(kernel, "host", args, 2 * args["n_segments"], ["y"], scratch)["y"]
    assert_same_bits(got, _attend(cache, case, 3, kv_type=kv_type), kv_type)


def test_all_forms_give_the_same_bits() -> None:
    cache = Cache.filled(300, 1, 16)
    args = _split(cache.case(2, [(0, 280)], 0.25), 280, 16)
    kernel = attend_split(head_dim=16, group=2, kv_type="f16")
    run_everywhere(kernel, args, args["n_segments"], scratch_nbytes=attend_split_scratch_nbytes(2))
