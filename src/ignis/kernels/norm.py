"""Root-mean-square normalization (NUMERICS 4). A unit is a token of `n_groups` rows of `n` values.

A row is a group of values that are normalized together: the whole token, or one head of it.

The result may lie exactly where the input lies.
"""

from __future__ import annotations

from ignis.kernels.lang import Builder, Value, f32, i64, kernel, ptr
from ignis.kernels.vectors import LANES, parts


@kernel(x=ptr, y=ptr, n=i64, n_groups=i64, eps=f32)
def normalize(
    k: Builder, *, x: Value, y: Value, n: Value, n_groups: Value, eps: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """y = x * r with r = 1 / sqrt(mean(x^2) + eps); f32[T, G, n]."""
    for row in k.range(begin * n_groups, end * n_groups):
        source, target = x.at(row * n * f32.nbytes), y.at(row * n * f32.nbytes)
        r = _inverse_rms(k, source, n, eps)
        for part in parts(k, n):
            part.store(target, part.load(source) * r)


@kernel(x=ptr, gain=ptr, y=ptr, n=i64, n_groups=i64)
def scale(
    k: Builder, *, x: Value, gain: Value, y: Value, n: Value, n_groups: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """y = x * gain, one gain a column; x f32[T, G, n], gain f32[n]."""
    for row in k.range(begin * n_groups, end * n_groups):
        source, target = x.at(row * n * f32.nbytes), y.at(row * n * f32.nbytes)
        for part in parts(k, n):
            part.store(target, part.load(source) * part.load(gain))


@kernel(x=ptr, gain=ptr, y=ptr, n=i64, n_groups=i64, eps=f32)
def rmsnorm(
    k: Builder, *, x: Value, gain: Value, y: Value, n: Value, n_groups: Value, eps: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """y = (x * r) * gain, the bits of `normalize` and `scale` in a row."""
    for row in k.range(begin * n_groups, end * n_groups):
        source, target = x.at(row * n * f32.nbytes), y.at(row * n * f32.nbytes)
        r = _inverse_rms(k, source, n, eps)
        for part in parts(k, n):
            part.store(target, part.load(source) * r * part.load(gain))


def _inverse_rms(k: Builder, row: Value, n: Value, eps: Value) -> Value:
    """1 / sqrt(mean(x^2) + eps) in all lanes: 16 sums by index modulo 16, then the tree."""
    sums = k.var(k.const(f32.x(LANES), 0.0))
    for part in parts(k, n):
        x = part.load(row)  # zeros past the end leave their sums as they are
        sums.set(k.fma(x, x, sums.get()))
    mean = k.tree_sum(sums.get()) / n.to(f32)
    return (1.0 / k.sqrt(mean + eps)).splat(LANES)
