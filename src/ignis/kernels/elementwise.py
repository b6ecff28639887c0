"""Kernels that treat every value of a row alike. A unit is a token, a row holds `n` values.

The result may lie exactly where an input lies.
"""

from __future__ import annotations

from collections.abc import Callable

from ignis.kernels import math
from ignis.kernels.lang import Builder, Value, f32, i64, kernel, ptr
from ignis.kernels.vectors import parts


@kernel(a=ptr, b=ptr, y=ptr, n=i64)
def add(
    k: Builder, *, a: Value, b: Value, y: Value, n: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """y = a + b; f32[T, n]."""
    _map(k, (a, b), y, n, begin, end, lambda u, v: u + v)


@kernel(a=ptr, b=ptr, y=ptr, n=i64)
def mul(
    k: Builder, *, a: Value, b: Value, y: Value, n: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """y = a * b; f32[T, n]."""
    _map(k, (a, b), y, n, begin, end, lambda u, v: u * v)


@kernel(x=ptr, y=ptr, n=i64)
def silu(
    k: Builder, *, x: Value, y: Value, n: Value, begin: Value, end: Value, scratch: Value
) -> None:
    """y = x / (1 + exp(-x)); f32[T, n]."""
    _map(k, (x,), y, n, begin, end, lambda u: math.silu(k, u))


@kernel(gate=ptr, up=ptr, y=ptr, n=i64)
def swiglu(
    k: Builder, *, gate: Value, up: Value, y: Value, n: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """y = silu(gate) * up, the bits of `silu` and `mul` in a row; f32[T, n]."""
    _map(k, (gate, up), y, n, begin, end, lambda u, v: math.silu(k, u) * v)


def _map(
    k: Builder, inputs: tuple[Value, ...], y: Value, n: Value, begin: Value, end: Value,
    function: Callable[..., Value],
) -> None:  # fmt: skip
    for token in k.range(begin, end):
        row_bytes = token * n * f32.nbytes
        for part in parts(k, n):
            lanes = [part.load(x.at(row_bytes)) for x in inputs]
            part.store(y.at(row_bytes), function(*lanes))
