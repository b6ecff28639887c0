"""The search behind Q2_K, Q4_K and Q5_K: x = d * sc * q - dmin * m, where all but d, dmin is whole.

The weighted squared error of each block is made small in three stages.

1. Each sub-block on its own, with real numbers for its scale a and minimum b. A grid of trial
   scales gives whole q by rounding; for given q the best a and b solve two linear equations,
   and how good they are follows from the same sums. The best trial stays.
2. The largest b gives dmin, and the largest a several d: sc of the sub-block with the largest a
   may end below the largest possible or be cut there. For each, whole sc and m next to a / d and
   b / dmin, with what is really stored and q rounded anew. The best d stays.
3. d and dmin solve the same kind of equations over the whole block, and better whole numbers are
   sought further away, twice.

The method is our own; the weights are those that llama.cpp's encoder without an importance matrix
works with, so that errors can be compared.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from ignis.gguf.encode import (
    PerBlock,
    PerScale,
    Spread,
    Values,
    better,
    by_magnitude,
    gathered,
    inverse,
    total,
)  # fmt: skip
from ignis.gguf.records import Bytes, Floats

_Steps: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]     # of sc from the nearest, of m

_N_TRIALS = 19
_SPARED = (-8, -3, -1, 0, 0.5, 1, 2, 3)     # how far the largest sc stays below `most`
_NEAR_STEPS: _Steps = ((0,), (-1, 1))
_FAR_STEPS: _Steps = ((-1, 0, 1), (-16, -5, -2, -1, 1, 2, 5, 16))
_N_ROUNDS = 2


class AffineBlocks(NamedTuple):
    """What [n] blocks store: d and dmin [n]; scales and minimums [n, S]; q [n, block_size]."""

    d: PerBlock
    dmin: PerBlock
    scales: Bytes
    minimums: Bytes
    q: Bytes


class _Problem(NamedTuple):
    """Values, weights and their sums; q goes to `top`, sc and m go to `most`."""

    spread: Spread
    x: Values
    w: Values
    wx: Values
    sum_w: PerScale
    sum_wx: PerScale
    top: int
    most: int


class _Parts(NamedTuple):
    error: PerScale
    scales: PerScale
    minimums: PerScale


class _Fit(NamedTuple):
    error: PerBlock
    d: PerBlock
    dmin: PerBlock
    scales: PerScale
    minimums: PerScale


def encode_affine(values: Floats, *, n_scales: int, top: int, most: int,
                  weight_floor: float) -> AffineBlocks:
    """Encode [n, block_size] values; q in 0..top, scales and minimums in 0..most.

    Errors are weighed by |x| + weight_floor * rms of the sub-block. A block with a NaN, an infinity
    or more than an f16 can scale gets an infinite d, with which nothing decodes to a number.
    """
    spread = Spread.of(values, n_scales)
    w = by_magnitude(spread.x, weight_floor)
    wx = w * spread.x
    p = _Problem(spread, spread.x, w, wx, total(w), total(wx), top, most)
    scale, minimum = _free_fit(p)
    none = np.full(len(values), np.inf, np.float32)
    zeros = np.zeros_like(scale)
    best = _Fit(none, none, none, zeros, zeros)
    dmin = spread.stored(minimum.max(axis=0) / np.float32(most))
    for spared in _SPARED:
        d = spread.stored(scale.max(axis=0) / np.float32(most - spared))
        best = better(best, _whole_fit(p, d, dmin, scale, minimum, _NEAR_STEPS))
    fit = best
    for _ in range(_N_ROUNDS):
        d, dmin = _refit(p, fit)
        fit = _whole_fit(p, d, dmin, fit.d * fit.scales, fit.dmin * fit.minimums, _FAR_STEPS)
        best = better(best, fit)
    q = _rounded(p, best.d * best.scales, best.dmin * best.minimums)
    return AffineBlocks(best.d * spread.unit, best.dmin * spread.unit, gathered(best.scales),
                        gathered(best.minimums), gathered(q))


def _free_fit(p: _Problem) -> tuple[PerScale, PerScale]:
    """Stage 1: scale and minimum of each sub-block as real numbers, neither below zero."""
    low = np.minimum(p.x.min(axis=0), np.float32(0))
    span = p.x.max(axis=0) - low
    above = p.x - low
    sum_wxx = total(p.wx * p.x)
    noise = np.float32(2**-20) * sum_wxx    # less cannot be told from an exact fit: first one stays
    least = np.full_like(low, np.inf)
    scale, minimum = np.zeros_like(low), -low
    for steps in np.linspace(p.top + 1.5, 0.8 * p.top, _N_TRIALS, dtype=np.float32):
        q = above * (steps / span)
        np.rint(q, out=q)
        np.clip(q, 0, p.top, out=q)
        a, b, gain = _solved(p, q)
        error = np.maximum(sum_wxx - gain, noise)
        closer = (error < least) & (a > 0)
        least = np.where(closer, error, least)
        scale, minimum = np.where(closer, a, scale), np.where(closer, b, minimum)
    return scale, minimum


def _solved(p: _Problem, q: Values) -> tuple[PerScale, PerScale, PerScale]:
    """The best (a, b), b >= 0, for given q, and what they take off the error; destroys q."""
    wq = p.w * q
    sum_wq = total(wq)
    wq *= q
    sum_wqq = total(wq)
    q *= p.wx
    sum_wqx = total(q)
    determinant = p.sum_w * sum_wqq - sum_wq * sum_wq
    a: PerScale = np.divide(p.sum_w * sum_wqx - p.sum_wx * sum_wq, determinant)
    b: PerScale = np.divide(sum_wq * sum_wqx - sum_wqq * p.sum_wx, determinant)
    without = ~(b > 0)
    a = np.where(without, np.divide(sum_wqx, sum_wqq), a)
    b = np.where(without, np.float32(0), b)
    return a, b, a * sum_wqx - b * p.sum_wx


def _whole_fit(p: _Problem, d: PerBlock, dmin: PerBlock, scale: PerScale, minimum: PerScale,
               steps: _Steps) -> _Fit:
    """The best whole numbers that `steps` reach from `scale` / d and `minimum` / dmin."""
    per_dmin = inverse(dmin)
    nearest_scale = np.rint(scale * inverse(d))
    nearest_minimum = np.rint(minimum * per_dmin).clip(0, p.most)
    best = _Parts(np.full_like(scale, np.inf), np.zeros_like(scale), np.zeros_like(scale))
    for step in steps[0]:
        scales = (nearest_scale + np.float32(step)).clip(0, p.most)
        q = _rounded(p, scales * d, nearest_minimum * dmin)
        solved = (scales * d * total(p.w * q) - p.sum_wx) / p.sum_w     # the best b for these q
        best = better(best, _measured(p, d, dmin, scales, nearest_minimum, q))
        best = better(best, _tried(p, d, dmin, scales, np.rint(solved * per_dmin)))
    for step in steps[1]:
        minimums = best.minimums + np.float32(step)
        best = better(best, _tried(p, d, dmin, best.scales, minimums))
    return _Fit(total(best.error), d, dmin, best.scales, best.minimums)


def _tried(p: _Problem, d: PerBlock, dmin: PerBlock, scales: PerScale,
           minimums: PerScale) -> _Parts:
    minimums = minimums.clip(0, p.most)
    q = _rounded(p, scales * d, minimums * dmin)
    return _measured(p, d, dmin, scales, minimums, q)


def _measured(p: _Problem, d: PerBlock, dmin: PerBlock, scales: PerScale, minimums: PerScale,
              q: Values) -> _Parts:
    """The error with these whole numbers; destroys q."""
    q *= scales * d
    q -= minimums * dmin
    q -= p.x
    q *= q
    q *= p.w
    return _Parts(total(q), scales, minimums)


def _rounded(p: _Problem, scale: PerScale, minimum: PerScale) -> Values:
    q = p.x + minimum
    q *= inverse(scale)
    np.rint(q, out=q)
    return np.clip(q, 0, p.top, out=q)


def _refit(p: _Problem, fit: _Fit) -> tuple[PerBlock, PerBlock]:
    """The best d and dmin for given whole numbers, where both come out positive."""
    sc, m = fit.scales, fit.minimums
    q = _rounded(p, fit.d * sc, fit.dmin * m)
    wq = p.w * q
    qm, mm, mx = total(total(wq) * sc * m), total(p.sum_w * m * m), total(p.sum_wx * m)
    qx = total(total(p.wx * q) * sc)
    qq = total(total(wq * q) * sc * sc)
    determinant = qq * mm - qm * qm
    d, dmin = (qx * mm - mx * qm) / determinant, (qx * qm - mx * qq) / determinant
    usable = (d > 0) & (dmin > 0)
    return (p.spread.stored(np.where(usable, d, fit.d)),
            p.spread.stored(np.where(usable, dmin, fit.dmin)))
