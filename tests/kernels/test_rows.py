"""Normalization and elementwise kernels: a wrong bit here changes every later value of a step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ignis.kernels.eager import fma_f32
from ignis.kernels.elementwise import (
    CHUNK,
    add,
    columns,
    geglu,
    gelu,
    mul,
    scale_by,
    silu,
    softcap,
    swiglu,
)
from ignis.kernels.norm import normalize, rmsnorm, scale
from tests.kernels.helpers import assert_same_bits, hostile_floats, run, run_everywhere

SIZES = [1, 2, 15, 16, 17, 31, 32, 33, 64, 100]
EPS = 1e-5


def _rows(n: int, seed: int = 0, n_tokens: int = 3) -> Any:
    return np.random.default_rng(seed).standard_normal((n_tokens, n)).astype(np.float32)


def _whole(n: int) -> dict[str, int]:
    """A row that is normalized as a whole."""
    return {"n": n, "n_groups": 1}


@pytest.mark.parametrize("n", SIZES)
def test_all_forms_give_the_same_bits(n: int) -> None:
    """Native code at any level that differs from the twin breaks the promise of equal bits."""
    x, other, gain = _rows(n), _rows(n, 1), _rows(n, 2)[0]
    y = np.zeros_like(x)
    normalized = run_everywhere(normalize(), {"x": x, "y": y, **_whole(n), "eps": EPS}, 3)
    scaled = run_everywhere(scale(), {"x": normalized, "gain": gain, "y": y, **_whole(n)}, 3)
    fused = run_everywhere(rmsnorm(), {"x": x, "gain": gain, "y": y, **_whole(n), "eps": EPS}, 3)
    assert_same_bits(fused, scaled, "rmsnorm against normalize and scale")

    assert_same_bits(run_everywhere(add(), {"a": x, "b": other, "y": y, "n": n}, 3), x + other,
                     "add")  # fmt: skip
    activated = run_everywhere(silu(), {"x": x, "y": y, "n": n}, 3)
    product = run_everywhere(mul(), {"a": activated, "b": other, "y": y, "n": n}, 3)
    assert_same_bits(product, activated * other, "mul")
    gated = run_everywhere(swiglu(), {"gate": x, "up": other, "y": y, "n": n}, 3)
    assert_same_bits(gated, product, "swiglu against silu and mul")

    activated = run_everywhere(gelu(), {"x": x, "y": y, "n": n}, 3)
    gated = run_everywhere(geglu(), {"gate": x, "up": other, "y": y, "n": n}, 3)
    assert_same_bits(gated, activated * other, "geglu against gelu and a product")
    scaled = run_everywhere(scale_by(), {"x": x, "y": y, "n": n, "factor": 0.3}, 3)
    assert_same_bits(scaled, x * np.float32(0.3), "scale_by")


@pytest.mark.parametrize("n", [1, 16, 20])
def test_heads_are_normalized_each_for_itself(n: int) -> None:
    """Norms of q and k: five heads of a token are five rows, with one gain for all."""
    x, gain = _rows(5 * n, 11), _rows(n, 12)[0]
    heads = {"x": x, "y": np.zeros_like(x), "n": n, "n_groups": 5}
    for kernel, more in (
        (normalize(), {"eps": EPS}), (scale(), {"gain": gain}),
        (rmsnorm(), {"gain": gain, "eps": EPS}),
    ):  # fmt: skip
        got = run_everywhere(kernel, heads | more, 3)
        rows = x.reshape(15, n)
        alone = {"x": rows, "y": np.zeros_like(rows), **_whole(n)}
        wanted = run(kernel, "host", alone | more, 15, ["y"])["y"]
        assert_same_bits(got.reshape(15, n), wanted, kernel.symbol)


@pytest.mark.parametrize(("width", "first", "n"), [(40, 0, 16), (40, 16, 24), (7, 3, 4)])
def test_columns_are_copied(width: int, first: int, n: int) -> None:
    x, y = _rows(width, 13), np.zeros((3, n), np.float32)
    got = run_everywhere(columns(), {"x": x, "y": y, "n": n, "width": width, "first": first}, 3)
    assert_same_bits(got, x[:, first : first + n].copy(), "columns")


def test_softcap_reaches_all_of_a_row() -> None:
    """Logits are capped in place, in pieces; a piece left out would win every argmax."""
    n = CHUNK + 21
    x = np.random.default_rng(14).uniform(-90, 90, (2, n)).astype(np.float32)
    args = {"x": x, "n": n, "n_chunks": 2, "cap": 30.0}
    got = run(softcap(), "host", args, 4, ["x"])["x"]
    wanted = 30 * np.tanh(x.astype(np.float64) / 30)
    assert (abs(got - wanted) <= 6 * 2.0**-24 * abs(wanted)).all()
    short = {"x": x[:, :40].copy(), "n": 40, "n_chunks": 1, "cap": 30.0}
    assert_same_bits(run_everywhere(softcap(), short, 2, "x"), got[:, :40].copy(), "softcap")


@pytest.mark.parametrize("n", [7, 16, 40])
def test_rmsnorm_equals_plain_scalar_code(n: int) -> None:
    """The order of the sum is the definition; a reordered sum would only show up as drift."""
    x, gain = _rows(n, 3), _rows(n, 4)[0]
    args = {"x": x, "gain": gain, "y": np.zeros_like(x), **_whole(n), "eps": EPS}
    got = run(rmsnorm(), "host", args, 3, ["y"])["y"]
    for row, result in zip(x, got, strict=True):
        sums = [np.float32(0)] * 16
        for index, value in enumerate(row):
            sums[index % 16] = fma_f32(value, value, sums[index % 16])[()]
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [sums[i] + sums[i + half] for i in range(half)]
        r = np.float32(1) / np.sqrt(sums[0] / np.float32(n) + np.float32(EPS))
        plain = np.array([v * r * g for v, g in zip(row, gain, strict=True)], np.float32)
        assert_same_bits(result, plain, "rmsnorm")


@pytest.mark.parametrize("n", [1, 17, 576, 4864])
def test_rmsnorm_is_close_to_float64(n: int) -> None:
    """The op means what it says: relative error within (n / 32 + 8) * 2^-24."""
    x, gain = 10 * _rows(n, 5), _rows(n, 6)[0]
    args = {"x": x, "gain": gain, "y": np.zeros_like(x), **_whole(n), "eps": EPS}
    got = run(rmsnorm(), "host", args, 3, ["y"])["y"]
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + np.float32(EPS)) * gain
    assert (abs(got - wanted) <= (n / 32 + 8) * 2.0**-24 * abs(wanted)).all()


def test_special_values_come_through_alike() -> None:
    """NaN, infinity and subnormals must neither vanish nor differ between targets."""
    n = 100
    rng = np.random.default_rng(7)
    x, other = (hostile_floats(rng, 3 * n).reshape(3, n) for _ in range(2))
    y = np.zeros_like(x)
    for kernel, args in (
        (normalize(), {"x": x, "y": y, **_whole(n), "eps": EPS}),
        (rmsnorm(), {"x": np.full_like(x, 1e-40), "gain": other[0], "y": y, **_whole(n),
                     "eps": 0.0}),
        (add(), {"a": x, "b": other, "y": y, "n": n}),
        (mul(), {"a": x, "b": other, "y": y, "n": n}),
        (silu(), {"x": x, "y": y, "n": n}),
        (swiglu(), {"gate": x, "up": other, "y": y, "n": n}),
        (gelu(), {"x": x, "y": y, "n": n}),
        (geglu(), {"gate": x, "up": other, "y": y, "n": n}),
        (scale_by(), {"x": x, "y": y, "n": n, "factor": 1.5}),
    ):
        run_everywhere(kernel, args, 3)


@pytest.mark.parametrize("n", [5, 48, 50])
def test_in_place_equals_out_of_place(n: int) -> None:
    """The planner lays a result over an input; a kernel that reads late would destroy it."""
    x, other = _rows(n, 8), _rows(n, 9)
    for kernel, args, name in (
        (rmsnorm(), {"x": x, "gain": other[0], **_whole(n), "eps": EPS}, "x"),
        (normalize(), {"x": x, **_whole(n), "eps": EPS}, "x"),
        (add(), {"a": x, "b": other, "n": n}, "b"),
        (mul(), {"a": x, "b": other, "n": n}, "a"),
        (silu(), {"x": x, "n": n}, "x"),
        (swiglu(), {"gate": x, "up": other, "n": n}, "up"),
        (gelu(), {"x": x, "n": n}, "x"),
        (geglu(), {"gate": x, "up": other, "n": n}, "up"),
        (scale_by(), {"x": x, "n": n, "factor": 0.7}, "x"),
    ):
        apart = run(kernel, "host", {**args, "y": np.zeros_like(x)}, 3, ["y"])["y"]
        in_place = run_everywhere(kernel, {**args, "y": args[name]}, 3)
        assert_same_bits(in_place, apart, kernel.symbol)


def test_units_are_independent() -> None:
    """Threads split the tokens; a row's bits must not depend on who computed its neighbours."""
    x = _rows(20, 10, n_tokens=5)
    args = {"x": x, "y": np.zeros_like(x), **_whole(20), "eps": EPS}
    whole = run(normalize(), "host", args, 5, ["y"])["y"]
    part = run(normalize(), "host", args, 4, ["y"], begin=2)["y"]
    assert_same_bits(part[2:4], whole[2:4], "middle units")
    assert not part[:2].any() and not part[4:].any()


def test_silu_at_the_edges() -> None:
    """Minus infinity once gave NaN as -inf / inf, and NaN reached the sampler."""
    x = np.array([[-np.inf, np.inf, np.nan, -0.0, 0.0, -1e30, -90.0, 90.0, -20.0]], np.float32)
    y = run_everywhere(silu(), {"x": x, "y": np.zeros_like(x), "n": x.size}, 1)[0]
    assert y[0] == 0 and np.signbit(y[0]) and y[1] == np.inf and np.isnan(y[2])
    assert np.signbit(y[3]) and not np.signbit(y[4])
    assert y[5] == 0 and y[6] == 0 and y[7] == 90
    assert y[8] == pytest.approx(-20 / (1 + math.exp(20)), rel=1e-6)


def test_silu_is_close_to_float64() -> None:
    """Four roundings after an exp that is right within a unit in the last place."""
    x = np.linspace(-80, 80, 20_001, dtype=np.float32)[None]
    got = run(silu(), "host", {"x": x, "y": np.zeros_like(x), "n": x.size}, 1, ["y"])["y"]
    wide = x.astype(np.float64)
    wanted = wide / (1 + np.exp(-wide))
    assert (abs(got - wanted) <= 4 * 2.0**-24 * abs(wanted)).all()
