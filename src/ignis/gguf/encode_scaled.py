"""The search behind Q3_K, Q6_K, IQ4_XS and IQ4_NL: x = d * sc * level, sc and levels whole.

The weighted squared error of each block is made small in the three stages of `encode_affine`, with
one number less in each:

1. a real scale a for each sub-block: for trial scales that map the value of largest magnitude
   around either end of the levels, the nearest levels give the best a by one division;
2. a d for the block, of several, with whole sc next to a / d;
3. d anew from all levels of the block, and better sc further away, twice.

Errors are weighed by x^2, as in llama.cpp's encoder without an importance matrix, and half the mean
square of the sub-block: x^2 alone gives small values up for little.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ignis.gguf.encode import (
    PerBlock,
    PerScale,
    Spread,
    Values,
    better,
    by_square,
    gathered,
    inverse,
    total,
)  # fmt: skip
from ignis.gguf.records import Floats

PEAKS_OF_32 = (-36, -34, -33, -32, -31.5, -31, -30, -29)
"""Peaks for scales of six bits: what the largest is divided by to give d."""

_WEIGHT_FLOOR = 0.5
_TRIALS_LOW = np.linspace(0.75, 1.15, 19, dtype=np.float32)     # of the ends of the levels
_TRIALS_HIGH = np.linspace(0.75, 1.15, 13, dtype=np.float32)
_NEAR_STEPS = (0,)                  # of sc from the nearest
_FAR_STEPS = (-2, -1, 0, 1, 2)
_N_ROUNDS = 2


class Levels(Protocol):
    """The whole numbers that a code may stand for, from `low` < 0 to `high` > 0."""

    low: int
    high: int

    def nearest(self, y: Values) -> Values:
        """Replace each y by the nearest level, in place; for NaN the result is any number."""
        ...


class EveryInteger:
    """The levels low, low + 1, ... high."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def nearest(self, y: Values) -> Values:
        np.rint(y, out=y)
        np.clip(y, self.low, self.high, out=y)
        return y


class Codebook:
    """Some whole numbers of -128..127, ascending: a table has the nearest for each half unit."""

    def __init__(self, levels: tuple[int, ...]) -> None:
        self.low, self.high = levels[0], levels[-1]
        middles = np.arange(-127.75, 128, 0.5)      # levels change between two middles, not within
        numbers = np.array(levels, np.float32)
        self._table = numbers[np.abs(middles[:, None] - numbers).argmin(axis=1)]

    def nearest(self, y: Values) -> Values:
        y += np.float32(128)
        y *= np.float32(2)
        np.clip(y, 0, 511, out=y)
        # By way of int16, which is three times as fast. What a NaN becomes there is wrapped.
        cells = y.astype(np.int16).astype(np.intp)
        self._table.take(cells, out=y, mode="wrap")
        return y


class ScaledBlocks(NamedTuple):
    """What [n] blocks store: d [n]; scales [n, S] and levels [n, block_size], both signed."""

    d: PerBlock
    scales: NDArray[np.int8]
    levels: NDArray[np.int8]


class _Problem(NamedTuple):
    spread: Spread
    x: Values
    w: Values
    wx: Values
    levels: Levels
    least: int      # sc goes from here
    most: int       # to here


class _Parts(NamedTuple):
    error: PerScale
    scales: PerScale


class _Fit(NamedTuple):
    error: PerBlock
    d: PerBlock
    scales: PerScale


def encode_scaled(values: Floats, levels: Levels, *, n_scales: int, least: int, most: int,
                  peaks: tuple[float, ...]) -> ScaledBlocks:
    """Encode [n, block_size] values; scales in least..most.

    peaks   d is the largest scale of a block over one of these, so that it becomes sc of that size,
            rounded and cut to the range

    A block with a NaN, an infinity or more than an f16 can scale gets an infinite d and scales of
    zero, with which nothing decodes to a number.
    """
    spread = Spread.of(values, n_scales)
    w = by_square(spread.x, _WEIGHT_FLOOR)
    p = _Problem(spread, spread.x, w, w * spread.x, levels, least, most)
    scale = _free_fit(p)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=0)[None], axis=0)[0]
    none = np.full(len(values), np.inf, np.float32)
    best = _Fit(none, none, np.zeros_like(scale))
    for peak in peaks:
        d = spread.stored(np.divide(largest, np.float32(peak)))
        best = better(best, _whole_fit(p, d, scale, _NEAR_STEPS))
    fit, steps = best, tuple(step for step in _FAR_STEPS if abs(step) <= most - least)
    for _ in range(_N_ROUNDS):
        fit = _whole_fit(p, _refit(p, fit), fit.d * fit.scales, steps)
        best = better(best, fit)
    scaled: Values = np.nan_to_num(p.x * inverse(best.d * best.scales), nan=0.0)
    chosen = levels.nearest(scaled)
    return ScaledBlocks(best.d * spread.unit, gathered(best.scales).view(np.int8),
                        gathered(chosen).view(np.int8))


def _free_fit(p: _Problem) -> PerScale:
    """Stage 1: the scale of each sub-block as a real number of either sign."""
    high, low = p.x.max(axis=0), p.x.min(axis=0)
    per_end = inverse(np.where(high > -low, high, low))
    most: PerScale = np.zeros_like(low)
    scale: PerScale = np.zeros_like(low)
    for end in (*(p.levels.low * _TRIALS_LOW), *(p.levels.high * _TRIALS_HIGH)):
        level = p.levels.nearest(p.x * (end * per_end))
        sum_wlx = total(p.wx * level)
        level *= level
        level *= p.w
        a = np.divide(sum_wlx, total(level))
        gain = a * sum_wlx
        closer = gain > most
        most, scale = np.where(closer, gain, most), np.where(closer, a, scale)
    return scale


def _whole_fit(p: _Problem, d: PerBlock, scale: PerScale, steps: tuple[int, ...]) -> _Fit:
    """The best whole scales within `steps` from `scale` / d."""
    nearest = np.rint(scale * inverse(d))
    best = _Parts(np.full_like(scale, np.inf), np.zeros_like(scale))
    for step in steps:
        scales = (nearest + np.float32(step)).clip(p.least, p.most)
        a = scales * d
        y = p.levels.nearest(p.x * inverse(a))
        y *= a
        y -= p.x
        y *= y
        y *= p.w
        best = better(best, _Parts(total(y), scales))
    return _Fit(total(best.error), d, best.scales)


def _refit(p: _Problem, fit: _Fit) -> PerBlock:
    """The best d for given levels and whole scales."""
    level = p.levels.nearest(p.x * inverse(fit.d * fit.scales))
    sum_wlx = total(total(p.wx * level) * fit.scales)
    level *= level
    level *= p.w
    d = np.divide(sum_wlx, total(total(level) * fit.scales * fit.scales))
    return p.spread.stored(np.where(np.isfinite(d), d, fit.d))
