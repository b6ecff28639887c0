"""Rotary embedding in both styles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ignis.errors import KernelError
from ignis.kernels.eager import fma_f32
from ignis.kernels.rope import rope
from tests.kernels.helpers import assert_same_bits, run, run_everywhere

SHAPES = [(2, 2), (16, 16), (32, 30), (32, 32), (40, 34), (64, 64), (80, 20), (96, 64), (128, 128)]


def _case(head_dim: int, n_rot: int, n_heads: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(head_dim + n_rot)
    n = n_heads * head_dim
    angles = np.arange(9)[:, None] * rng.uniform(0, 1, n_rot // 2)
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    x = rng.standard_normal((4, n)).astype(np.float32)
    positions = np.array([0, 8, 3, 8], np.int32)
    return {"x": x, "y": np.zeros_like(x), "positions": positions, "table": table, "n": n}


def _pairs(n_rot: int, style: str) -> list[tuple[int, int]]:
    half = n_rot // 2
    return [(i, i + half) if style == "neox" else (2 * i, 2 * i + 1) for i in range(half)]


@pytest.mark.parametrize("style", ["neox", "interleaved"])
@pytest.mark.parametrize(("head_dim", "n_rot"), SHAPES)
def test_equals_plain_code_and_the_rotation(head_dim: int, n_rot: int, style: str) -> None:
    """A swapped pair or sine passes for noise end to end; here it cannot."""
    case = _case(head_dim, n_rot)
    kernel = rope(head_dim=head_dim, n_rot=n_rot, style=style)
    got = run_everywhere(kernel, case, 4)
    heads = case["x"].reshape(4, -1, head_dim)
    plain, exact = heads.copy(), heads.astype(np.float64)
    for t, position in enumerate(case["positions"]):
        for index, (i, j) in enumerate(_pairs(n_rot, style)):
            c, s = case["table"][position, :, index]
            a, b = heads[t, :, i], heads[t, :, j]
            plain[t, :, i] = fma_f32(a, c, -(b * s))
            plain[t, :, j] = fma_f32(a, s, b * c)
            turned = (a + 1j * b.astype(np.float64)) * (float(c) + 1j * float(s))
            exact[t, :, i], exact[t, :, j] = turned.real, turned.imag
    assert_same_bits(got, plain.reshape(got.shape), "rope")
    size = 2 * np.abs(heads).max()
    assert (abs(got - exact.reshape(got.shape)) <= 2 * 2.0**-24 * size).all()
    in_place = run(kernel, "host", {**case, "y": case["x"]}, 4, ["y"])["y"]
    assert_same_bits(in_place, got, "rope in place")


def test_position_zero_changes_nothing() -> None:
    case = _case(64, 64)
    got = run(rope(head_dim=64, n_rot=64, style="neox"), "host", case, 1, ["y"])["y"]
    assert np.array_equal(got[0], case["x"][0])


@pytest.mark.parametrize(
    ("n_rot", "style"), [(33, "neox"), (66, "neox"), (0, "neox"), (32, "gptj")]
)
def test_impossible_choices_are_refused(n_rot: int, style: str) -> None:
    with pytest.raises(KernelError, match="rope"):
        run(rope(head_dim=64, n_rot=n_rot, style=style), "eager", _case(64, 64), 1, ["y"])
