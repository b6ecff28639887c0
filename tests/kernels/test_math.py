"""exp, tanh and gelu, on which softmax, gates and caps stand, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ignis.kernels import math
from ignis.kernels.lang import Builder, Kernel, Value, f32, kernel, ptr
from tests.kernels.helpers import assert_same_bits, hostile_floats, run, run_everywhere


@kernel(x=ptr, y=ptr)
def exp16(k: Builder, *, x: Value, y: Value, begin: Value, end: Value, scratch: Value) -> None:
    """exp of rows of 16."""
    for i in k.range(begin, end):
        y.at(i * 64).store(math.exp(k, x.at(i * 64).load(f32.x(16))))


@kernel(x=ptr, y=ptr)
def exp1(k: Builder, *, x: Value, y: Value, begin: Value, end: Value, scratch: Value) -> None:
    """exp of one value."""
    for i in k.range(begin, end):
        y.at(i * 4).store(math.exp(k, x.at(i * 4).load(f32)))


@kernel(x=ptr, y=ptr)
def exp_nonpositive16(
    k: Builder, *, x: Value, y: Value, begin: Value, end: Value, scratch: Value
) -> None:
    """The short exp of rows of 16."""
    for i in k.range(begin, end):
        y.at(i * 64).store(math.exp_nonpositive(k, x.at(i * 64).load(f32.x(16))))


def test_the_short_exp_has_the_bits_of_the_long_one() -> None:
    """Where both are defined: ties of n, subnormal results, both zeros, NaN of any payload."""
    rng = np.random.default_rng(3)
    hostile = hostile_floats(rng, 1 << 16)
    ties = ((np.arange(304) / -2) * np.log(2)).astype(np.float32)
    near = (ties.view(np.int32)[:, None] + np.arange(-50, 50)).astype(np.int32).reshape(-1)
    x = np.concatenate([
        -np.abs(hostile), rng.uniform(-106, 0, 1 << 20).astype(np.float32),
        np.where(near == 0, 0, near | -(2**31)).astype(np.int32).view(np.float32),
        np.array([0xFFC00001, 0x7FC12345, 0x7F800001], np.uint32).view(np.float32),
    ])  # fmt: skip
    x = np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])
    got = run(exp_nonpositive16(), "host", {"x": x, "y": np.zeros_like(x)}, len(x) // 16, ["y"])
    assert_same_bits(got["y"], _exp(x), "exp of numbers up to zero")
    few = np.ascontiguousarray(x[-4096:])
    run_everywhere(exp_nonpositive16(), {"x": few, "y": np.zeros_like(few)}, len(few) // 16)


def _exp(x: Any) -> Any:
    return run(exp16(), "host", {"x": x, "y": np.zeros_like(x)}, len(x) // 16, ["y"])["y"]


def test_exp_is_within_one_unit_in_the_last_place() -> None:
    """Normal results; the true value is float64's, far finer than the bound."""
    x = np.linspace(-87.3, 88.7, 1 << 20).astype(np.float32)
    wanted = np.exp(x.astype(np.float64))
    units = abs(_exp(x) - wanted) / np.spacing(wanted.astype(np.float32))
    assert units.max() < 1.0
    small = np.linspace(-0.01, 0.01, 1 << 12).astype(np.float32)
    wanted = np.exp(small.astype(np.float64))
    assert (abs(_exp(small) - wanted) / np.spacing(wanted.astype(np.float32))).max() < 0.75


def test_exp_rounds_subnormal_results_once() -> None:
    """Below 2^-126 the error stays below one step of 2^-149, down to zero."""
    x = np.linspace(-104.5, -87.2, 1 << 16).astype(np.float32)
    y = _exp(x)
    assert (abs(y - np.exp(x.astype(np.float64))) < 2.0**-149).all()
    assert (y[x > -103.9] > 0).all() and (y[x < -103.98] == 0).all()


def test_exp_never_falls() -> None:
    """A softmax weight may not exceed that of a larger score by more than rounding."""
    x = np.sort(np.random.default_rng(0).uniform(-105, 89, 1 << 16).astype(np.float32))
    y = _exp(x).astype(np.float64)
    assert (y[1:] >= y[:-1] * (1 - 2.0**-23)).all()


def test_exp_at_the_edges() -> None:
    x = np.zeros(16, np.float32)
    x[:10] = [0.0, -0.0, np.inf, -np.inf, np.nan, 88.8, 1e38, -1e38, -104.0, 88.72]
    y = run_everywhere(exp16(), {"x": x, "y": np.zeros_like(x)}, 1)
    assert y[0] == 1 and y[1] == 1 and y[2] == np.inf and y[3] == 0 and np.isnan(y[4])
    assert y[5] == np.inf and y[6] == np.inf and y[7] == 0 and y[8] == 0 and np.isfinite(y[9])


def test_exp_has_the_same_bits_everywhere_and_for_scalars() -> None:
    rng = np.random.default_rng(1)
    usual = rng.uniform(-110, 95, 4096).astype(np.float32)
    x = np.concatenate([usual, hostile_floats(rng, 1024)])
    y = run_everywhere(exp16(), {"x": x, "y": np.zeros_like(x)}, len(x) // 16)
    scalars = run(exp1(), "host", {"x": x, "y": np.zeros_like(x)}, len(x), ["y"])["y"]
    assert_same_bits(scalars, y, "scalar exp")


@kernel(x=ptr, y=ptr)
def tanh16(k: Builder, *, x: Value, y: Value, begin: Value, end: Value, scratch: Value) -> None:
    """tanh of rows of 16."""
    for i in k.range(begin, end):
        y.at(i * 64).store(math.tanh(k, x.at(i * 64).load(f32.x(16))))


@kernel(x=ptr, y=ptr)
def gelu16(k: Builder, *, x: Value, y: Value, begin: Value, end: Value, scratch: Value) -> None:
    """gelu of rows of 16."""
    for i in k.range(begin, end):
        y.at(i * 64).store(math.gelu(k, x.at(i * 64).load(f32.x(16))))


def _units(kernel: Kernel, x: Any, wanted: Any) -> float:
    """The largest error in units of the last place."""
    got = run(kernel, "host", {"x": x, "y": np.zeros_like(x)}, len(x) // 16, ["y"])["y"]
    ulp = np.spacing(np.maximum(np.abs(wanted), 2.0**-126).astype(np.float32))
    return float((abs(got - wanted) / ulp).max())


def test_tanh_is_within_two_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-12, 12, 1 << 18), np.linspace(-0.7, 0.7, 1 << 18)])
    x = x.astype(np.float32)
    assert _units(tanh16(), x, np.tanh(x.astype(np.float64))) < 2
    tiny = np.logspace(-42, -1, 1 << 12).astype(np.float32)
    assert _units(tanh16(), tiny, np.tanh(tiny.astype(np.float64))) < 2


def test_gelu_is_within_four_units_in_the_last_place() -> None:
    """Down to -10; below, the true value is under 2^-122 and the result is -0."""
    x = np.linspace(-10, 12, 1 << 19).astype(np.float32)
    wide = x.astype(np.float64)
    slope = -2 * np.sqrt(2 / np.pi)
    wanted = wide / (1 + np.exp(slope * (wide + 0.044715 * wide**3)))
    assert _units(gelu16(), x, wanted) < 4


@pytest.mark.parametrize(("kernel", "edges"), [
    (tanh16(), [0.0, 0.0, 1.0, -1.0, np.nan]), (gelu16(), [0.0, -0.0, np.inf, -0.0, np.nan]),
])  # fmt: skip
def test_tanh_and_gelu_have_the_same_bits_everywhere(kernel: Kernel, edges: list[float]) -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate([
        np.array([0.0, -0.0, np.inf, -np.inf, np.nan, *[0.5] * 11], np.float32),
        rng.uniform(-12, 12, 2048).astype(np.float32), hostile_floats(rng, 1024),
    ])  # fmt: skip
    y = run_everywhere(kernel, {"x": x, "y": np.zeros_like(x)}, len(x) // 16)
    assert_same_bits(y[:5], np.array(edges, np.float32), "edges")
