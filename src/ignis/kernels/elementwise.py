"""Kernels that treat every value of a row alike. A unit is a token, a row holds `n` values.

The result may lie exactly where an input lies.
"""

from __future__ import annotations

from collections.abc import Callable

from ignis.kernels import math
from ignis.kernels.lang import Builder, Value, f32, i64, kernel, ptr
from ignis.kernels.vectors import LANES, parts

CHUNK = 4096  # values of a long row that are one unit of work


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


@kernel(x=ptr, y=ptr, n=i64)
def gelu(
    k: Builder, *, x: Value, y: Value, n: Value, begin: Value, end: Value, scratch: Value
) -> None:
    """y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))); f32[T, n]."""
    _map(k, (x,), y, n, begin, end, lambda u: math.gelu(k, u))


@kernel(gate=ptr, up=ptr, y=ptr, n=i64)
def geglu(
    k: Builder, *, gate: Value, up: Value, y: Value, n: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """y = gelu(gate) * up, the bits of `gelu` and `mul` in a row; f32[T, n]."""
    _map(k, (gate, up), y, n, begin, end, lambda u, v: math.gelu(k, u) * v)


@kernel(x=ptr, y=ptr, n=i64, factor=f32)
def scale_by(
    k: Builder, *, x: Value, y: Value, n: Value, factor: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """y = x * factor; f32[T, n]."""
    _map(k, (x,), y, n, begin, end, lambda u: u * factor.splat(LANES))


@kernel(x=ptr, y=ptr, n=i64, width=i64, first=i64)
def columns(
    k: Builder, *, x: Value, y: Value, n: Value, width: Value, first: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """y = x[:, first : first + n], copied; x f32[T, width], y f32[T, n] apart from it."""
    for token in k.range(begin, end):
        source = x.at((token * width + first) * f32.nbytes)
        target = y.at(token * n * f32.nbytes)
        for part in parts(k, n):
            part.store(target, part.load(source))


@kernel(x=ptr, n=i64, n_chunks=i64, cap=f32)
def softcap(
    k: Builder, *, x: Value, n: Value, n_chunks: Value, cap: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """x = cap * tanh(x / cap), in place; f32[R, n]. A unit is `CHUNK` values of a row.

    Rows of logits are long and few: one would not keep a second thread busy.
    """
    for unit in k.range(begin, end):
        row, chunk = unit // n_chunks, unit % n_chunks
        first = chunk * CHUNK
        place = x.at((row * n + first) * f32.nbytes)
        for part in parts(k, k.minimum(n - first, k.const(i64, CHUNK))):
            part.store(place, math.softcap(k, part.load(place), cap.splat(LANES)))


def _map(
    k: Builder, inputs: tuple[Value, ...], y: Value, n: Value, begin: Value, end: Value,
    function: Callable[..., Value],
) -> None:  # fmt: skip
    for token in k.range(begin, end):
        row_bytes = token * n * f32.nbytes
        for part in parts(k, n):
            lanes = [part.load(x.at(row_bytes)) for x in inputs]
            part.store(y.at(row_bytes), function(*lanes))
