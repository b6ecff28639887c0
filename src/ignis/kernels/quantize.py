"""Quantizes activations to A8: blocks of 32 int8 with one f32 scale (NUMERICS 1)."""

from __future__ import annotations

from ignis.kernels import a8
from ignis.kernels.lang import Builder, Value, f32, i8, i16, i32, i64, kernel, ptr

BLOCK = 32
_LANES = 16
_Q_MAX = 127.0
_SMALLEST = 2.0**-100  # below it a block is zero: 127 / amax must not overflow
_F32_MAX = 3.4028234663852886e38


@kernel(x=ptr, y=ptr, rows=ptr, n=i64, n_rows=i64)
def quantize(
    k: Builder, *, x: Value, y: Value, rows: Value, n: Value, n_rows: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """Rows of x, f32[.., n], to `n_rows` rows of the blocks that `a8` draws. A unit is a row of y.

    `n` is a multiple of 32; `rows` is i32 [n_rows], the row of x that each row of y takes.
    """
    n_blocks = n // BLOCK
    for token in k.range(begin, end):
        blocks = y.at(token * a8.BLOCK_NBYTES)
        row = x.at(rows.at(token * 4).load(i32).to(i64) * n * f32.nbytes)
        for block in k.range(n_blocks):
            _quantize_block(
                k, row.at(block * (BLOCK * f32.nbytes)), blocks.at(block * n_rows * a8.BLOCK_NBYTES)
            )


def _quantize_block(k: Builder, x: Value, y: Value) -> None:
    halves = [x.at(half * _LANES * f32.nbytes).load(f32.x(_LANES)) for half in range(2)]
    # Without their signs floats are ordered as their bits are, and NaN stands above infinity.
    patterns = [k.absolute(half).bits(i32.x(_LANES)) for half in halves]
    amax = k.tree_max(k.maximum(patterns[0], patterns[1])).bits(f32)
    usual = (amax >= _SMALLEST) & (amax <= _F32_MAX)  # false for NaN and infinity
    inverse = (_Q_MAX / amax).splat(_LANES)
    # NaN and infinity in the block show as d = NaN; a block of tiny values is zero.
    unusual = k.select(amax < _SMALLEST, k.const(f32, 0.0), float("nan"))
    d = k.select(usual, amax / _Q_MAX, unusual)
    scaled = [k.select(usual, k.round_even(half * inverse), 0.0) for half in halves]
    q = k.concat(*(half.to(i32).to(i8) for half in scaled))
    s = _half_sums(k, q)
    total = s.lane(0) + s.lane(1)
    y.store(q)
    y.at(a8.D_AT).store(d)
    y.at(a8.N_AT).store(total * -128)
    y.at(a8.DS_AT).store(d * total.to(f32))
    y.at(a8.HALVES_AT).store(s.to(i16))


def _half_sums(k: Builder, q: Value) -> Value:
    """The sums of the first and of the last 16 bytes, i32x2."""
    fours = k.dot4(k.const(i32.x(8), 0), k.const(i8.x(BLOCK), 1), q, u_max=1)
    twos = k.shuffle(fours, fours, [0, 1, 4, 5]) + k.shuffle(fours, fours, [2, 3, 6, 7])
    return k.shuffle(twos, twos, [0, 2]) + k.shuffle(twos, twos, [1, 3])
