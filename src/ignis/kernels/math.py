"""Elementary functions on f32 lanes: our own polynomials, the same bits on every target.

Every function takes scalars and vectors. NaN in gives NaN out.
"""

from __future__ import annotations

from ignis.kernels.lang import Builder, Value, f32, i32

_LOG2_E = 1.4426950408889634
# ln 2 as a float and what that float lacks; n * _LN2_HIGH loses nothing inside an fma.
_LN2_HIGH = 0.6931471824645996
_LN2_LOW = -1.9046542121259336e-09
# exp(r) = 1 + r + r^2 * q(r) on |r| <= ln(2) / 2; q is minimax for the relative error (3.7e-9).
# Coefficients are f32 values, the highest power first.
_EXP_Q = (
    0.0013814537087455392, 0.008368746377527714, 0.04166839271783829, 0.1666652113199234,
    0.4999999403953552,
)  # fmt: skip
# Below the first every result rounds to zero, above the second to infinity.
_EXP_LOWEST, _EXP_HIGHEST = -105.0, 90.0
_F32_MAX = 3.4028234663852886e38


def exp(k: Builder, x: Value) -> Value:
    """e to the x within one unit in the last place; subnormal results included.

    x = n ln 2 + r, e^r from the polynomial, then times 2^n in two exact-or-final steps: the first
    product never leaves the normal range, so only the second one rounds.
    """
    inside = k.select(x < _EXP_LOWEST, _EXP_LOWEST, x)
    inside = k.select(inside > _EXP_HIGHEST, _EXP_HIGHEST, inside)
    n = k.round_even(inside * _LOG2_E)
    r = k.fma(n, k.const(x.type, -_LN2_HIGH), inside)
    r = k.fma(n, k.const(x.type, -_LN2_LOW), r)
    q = k.const(x.type, _EXP_Q[0])
    for coefficient in (*_EXP_Q[1:], 1.0, 1.0):
        q = k.fma(q, r, k.const(x.type, coefficient))
    # The conversion of NaN to an integer is undefined; any n will do, q is NaN already.
    power = k.select(n == n, n, 0.0).to(i32)
    half = power.sar(1)
    return q * _power_of_two(k, half) * _power_of_two(k, power - half)


def silu(k: Builder, x: Value) -> Value:
    """x / (1 + exp(-x)); minus infinity gives minus zero, its limit."""
    quotient = x / (exp(k, -x) + 1.0)
    return k.select(x < -_F32_MAX, -0.0, quotient)


def _power_of_two(k: Builder, n: Value) -> Value:
    """2^n as f32 for n in [-126, 127], by its bit pattern."""
    return ((n + 127) << 23).bits(f32.x(n.type.lanes))
