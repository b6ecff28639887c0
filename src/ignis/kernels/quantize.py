"""Quantizes activations to A8: blocks of 32 int8 with one f32 scale (NUMERICS 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ignis.kernels import a8
from ignis.kernels.lang import Builder, Value, f32, i8, i32, i64, kernel, ptr
from ignis.kernels.rows import transpose

BLOCK = 32
LANES = f32.x(16)
_BLOCK_NBYTES = BLOCK * f32.nbytes
_TOGETHER = 4  # blocks
_SCALES = f32.x(_TOGETHER)
_Q_MAX = 127.0
_SMALLEST = 2.0**-100  # below it a block is zero: 127 / amax must not overflow
_F32_MAX = 3.4028234663852886e38

Combine: TypeAlias = "Callable[[Value, Value], Value]"


@kernel(x=ptr, y=ptr, rows=ptr, n=i64, n_rows=i64)
def quantize(
    k: Builder, *, x: Value, y: Value, rows: Value, n: Value, n_rows: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """Rows of x, f32[.., n], to `n_rows` rows of the blocks that `a8` draws. A unit is a row of y.

    `n` is a multiple of 32; `rows` is i32 [n_rows], the row of x that each row of y takes.
    """
    n_blocks = n // BLOCK

    def source(token: Value) -> Value:
        return x.at(rows.at(token * 4).load(i32).to(i64) * n * f32.nbytes)

    def target(token: Value, block: Value) -> Value:
        return y.at((block * n_rows + token) * a8.BLOCK_NBYTES)

    # Four tokens at a time, whose blocks lie side by side in y; of a single one, four blocks.
    whole = begin + (end - begin) // _TOGETHER * _TOGETHER
    for first in k.range(begin, whole, _TOGETHER):
        tokens = [first + i for i in range(_TOGETHER)]
        sources = [source(token) for token in tokens]
        for block in k.range(n_blocks):
            _quantize_blocks(k, [row.at(block * _BLOCK_NBYTES) for row in sources],
                             [target(token, block) for token in tokens])  # fmt: skip
    for token in k.range(whole, end):
        row = source(token)
        for first in k.range(0, n_blocks, _TOGETHER):
            # Past the last block, that block again.
            blocks = [k.minimum(first + i, n_blocks - 1) for i in range(_TOGETHER)]
            _quantize_blocks(k, [row.at(block * _BLOCK_NBYTES) for block in blocks],
                             [target(token, block) for block in blocks])  # fmt: skip


def _quantize_blocks(k: Builder, xs: Sequence[Value], ys: Sequence[Value]) -> None:
    """Four blocks of 32 values each, with their scales and sums side by side in vectors."""
    blocks = [[x.at(half * LANES.nbytes).load(LANES) for half in range(2)] for x in xs]
    # Without their signs floats are ordered as their bits are, and NaN stands above infinity.
    patterns = [
        k.maximum(*(k.absolute(half).bits(i32.x(LANES.lanes)) for half in block))
        for block in blocks
    ]
    amax = _fold_lanes(k, patterns, k.maximum).bits(_SCALES)
    usual = (amax >= _SMALLEST) & (amax <= _F32_MAX)  # false for NaN and infinity
    # NaN and infinity in the block show as d = NaN; a block of tiny values is zero.
    unusual = k.select(amax < _SMALLEST, k.const(_SCALES, 0.0), float("nan"))
    d = k.select(usual, amax / _Q_MAX, unusual)
    inverse = k.select(usual, k.const(_SCALES, _Q_MAX) / amax, 0.0)
    q = [_codes(k, block, inverse.lane(i)) for i, block in enumerate(blocks)]
    first, last = _half_sums(k, q)
    total = first + last
    tails = transpose(k, [d.bits(total.type), total * -128, (d * total.to(f32)).bits(total.type),
                          (first & 0xFFFF) | (last << 16)])  # fmt: skip
    for y, codes, tail in zip(ys, q, tails, strict=True):
        y.store(codes)
        y.at(a8.D_AT).store(tail)


def _codes(k: Builder, block: Sequence[Value], inverse: Value) -> Value:
    """The bytes of a block, i8x32; zeros where `inverse` is zero, whatever the block holds."""
    factor = inverse.splat(LANES.lanes)
    halves = [k.select(factor > 0.0, k.round_even(half * factor), 0.0) for half in block]
    return k.concat(*(half.to(i32).to(i8) for half in halves))


def _half_sums(k: Builder, q: Sequence[Value]) -> tuple[Value, Value]:
    """Of each of four blocks the sum of its first and of its last 16 bytes, i32x4."""
    ones = k.const(i8.x(2 * BLOCK), 1)
    fours = [
        k.dot4(k.const(i32.x(LANES.lanes), 0), ones, k.concat(*pair), u_max=1)
        for pair in (q[:2], q[2:])
    ]
    sums = _halved(k, _joined(k, fours[0], fours[1], _add), _add)
    return k.shuffle(sums, sums, [0, 2, 4, 6]), k.shuffle(sums, sums, [1, 3, 5, 7])


def _fold_lanes(k: Builder, vectors: Sequence[Value], combine: Combine) -> Value:
    """All lanes of each of four vectors of 16 combined, in the order of the vectors."""
    a, b, c, d = vectors
    each_four = _joined(k, _joined(k, a, b, combine), _joined(k, c, d, combine), combine)
    return _halved(k, _halved(k, each_four, combine), combine)


def _joined(k: Builder, a: Value, b: Value, combine: Combine) -> Value:
    """Lanes 2 i and 2 i + 1 combined, of `a` and behind them of `b`."""
    return _neighbours(k, a, b, 2 * a.type.lanes, combine)


def _halved(k: Builder, a: Value, combine: Combine) -> Value:
    """Lanes 2 i and 2 i + 1 combined."""
    return _neighbours(k, a, a, a.type.lanes, combine)


def _neighbours(k: Builder, a: Value, b: Value, n: int, combine: Combine) -> Value:
    """The first n lanes of `a` and `b`, each with its neighbour."""
    return combine(k.shuffle(a, b, list(range(0, n, 2))), k.shuffle(a, b, list(range(1, n, 2))))


def _add(a: Value, b: Value) -> Value:
    return a + b
