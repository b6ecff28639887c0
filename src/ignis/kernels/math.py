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
# Floats near 1.5 * 2^23 are integers. 190 is the exponent's bias and 63; it is even, so that ties
# go to even integers as `round_even` has them.
_TO_INTEGER = 1.5 * 2.0**23 + 190.0
_F32_MAX = 3.4028234663852886e38
# tanh(x) = x + x^3 * p(x^2) on |x| <= 0.6; p is minimax for the relative error (1.5e-9).
_TANH_P = (
    0.0022310626227408648, -0.00826708972454071, 0.021734438836574554, -0.053952474147081375,
    0.13333247601985931, -0.3333333134651184,
)  # fmt: skip
_TANH_NEAR = 0.6
# gelu(x) = x / (1 + exp(x * (A + B x^2))) with A = -2 sqrt(2 / pi) and B = 0.044715 A, each as a
# float and what that float lacks. Below -10 the result is smaller than 2^-122.
_GELU_A, _GELU_A_LOW = -1.5957691669464111, 4.534068054340423e-08
_GELU_B, _GELU_B_LOW = -0.07135481387376785, -2.3988324659995897e-09
_GELU_FAR = 10.0


def exp(k: Builder, x: Value) -> Value:
    """e to the x within one unit in the last place; subnormal results included.

    x = n ln 2 + r, e^r from the polynomial, then times 2^n in two exact-or-final steps: the first
    product never leaves the normal range, so only the second one rounds.
    """
    inside = k.select(x < _EXP_LOWEST, _EXP_LOWEST, x)
    inside = k.select(inside > _EXP_HIGHEST, _EXP_HIGHEST, inside)
    n = k.round_even(inside * _LOG2_E)
    q = _exp_reduced(k, inside, n)
    # The conversion of NaN to an integer is undefined; any n will do, q is NaN already.
    power = k.select(n == n, n, 0.0).to(i32)
    half = power.sar(1)
    return q * _power_of_two(k, half) * _power_of_two(k, power - half)


def exp_nonpositive(k: Builder, x: Value) -> Value:
    """`exp` of numbers that are not above zero: the same bits in two thirds of the instructions.

    Adding `_TO_INTEGER` rounds to an integer and leaves it, biased, in the lowest bits, where a
    shift turns it into the exponent of 2^(n + 63); the product with that is exact, so only the
    last one rounds. What vanishes, as the weight of a key that is masked does, becomes zero before
    that product: one that rounded to zero there would cost an Intel processor a hundred cycles.
    """
    shifted = x * _LOG2_E + _TO_INTEGER
    q = _exp_reduced(k, x, shifted - _TO_INTEGER)
    power = (shifted.bits(i32.x(x.type.lanes)) << 23).bits(x.type)
    return k.select(x < _EXP_LOWEST, 0.0, q * power) * 2.0**-63


def silu(k: Builder, x: Value) -> Value:
    """x / (1 + exp(-x)); minus infinity gives minus zero, its limit."""
    quotient = x / (exp(k, -x) + 1.0)
    return k.select(x < -_F32_MAX, -0.0, quotient)


def sigmoid(k: Builder, x: Value) -> Value:
    """1 / (1 + exp(-x))."""
    return 1.0 / (exp(k, -x) + 1.0)


def tanh(k: Builder, x: Value) -> Value:
    """The hyperbolic tangent within two units in the last place; +0 for either zero."""
    size = k.absolute(x)
    square = x * x
    p = k.const(x.type, _TANH_P[0])
    for coefficient in _TANH_P[1:]:
        p = k.fma(p, square, k.const(x.type, coefficient))
    near = k.fma(x * square, p, x)
    # From 10 on the result is one; doubling infinity is harmless, its product above is not used.
    far = 1.0 - 2.0 / (exp(k, size + size) + 1.0)
    return k.select(size < _TANH_NEAR, near, k.select(x < 0.0, -far, far))


def gelu(k: Builder, x: Value) -> Value:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) within four units in the last place.

    The same as x / (1 + exp(y)) for y = x * (A + B x^2), which loses nothing by cancellation. y is
    kept as a sum of two floats: exp makes a relative error of an absolute one, and y grows to 87.
    Minus infinity gives minus zero, its limit.
    """
    inside = k.select(x < -_GELU_FAR, -_GELU_FAR, x)
    inside = k.select(inside > _GELU_FAR, _GELU_FAR, inside)
    a, b = k.const(x.type, _GELU_A), k.const(x.type, _GELU_B)
    square = inside * inside
    cubic = b * square
    bracket = a + cubic
    added = bracket - a
    low = (a - (bracket - added)) + (cubic - added)  # what the sum lost (Knuth's two-sum)
    low = low + k.fma(b, square, -cubic) + _GELU_A_LOW
    low = k.fma(b, k.fma(inside, inside, -square), low)
    low = k.fma(k.const(x.type, _GELU_B_LOW), square, low)
    y = inside * bracket
    y_low = k.fma(inside, low, k.fma(inside, bracket, -y))
    e = exp(k, y)
    quotient = x / (k.fma(e, y_low, e) + 1.0)
    return k.select(x < -_GELU_FAR, -0.0, quotient)


def softcap(k: Builder, x: Value, cap: Value) -> Value:
    """cap * tanh(x / cap): x where it is small, never beyond the cap."""
    return cap * tanh(k, x / cap)


def _exp_reduced(k: Builder, x: Value, n: Value) -> Value:
    """e to the r for x = n ln 2 + r with n the nearest integer to x / ln 2."""
    r = k.fma(n, k.const(x.type, -_LN2_HIGH), x)
    r = k.fma(n, k.const(x.type, -_LN2_LOW), r)
    q = k.const(x.type, _EXP_Q[0])
    for coefficient in (*_EXP_Q[1:], 1.0, 1.0):
        q = k.fma(q, r, k.const(x.type, coefficient))
    return q


def _power_of_two(k: Builder, n: Value) -> Value:
    """2^n as f32 for n in [-126, 127], by its bit pattern."""
    return ((n + 127) << 23).bits(f32.x(n.type.lanes))
