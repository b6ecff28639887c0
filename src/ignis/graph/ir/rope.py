"""Rope frequencies, cosines and sines with the same bits on every machine.

No libm and no NumPy transcendental: frequencies come from exact decimal arithmetic, cosines and
sines from polynomials in f64 over a reduced angle, using only + - * and rint, each of which
IEEE 754 rounds in one way. What reaches a kernel is rounded once to f32 (NUMERICS 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from ignis.errors import GraphError

F64: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
F32: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

MAX_ANGLE = 2**24
"""Positions times frequency must stay below this: the reduction is exact up to here."""

_HALF_PI = Fraction("1.57079632679489661923132169163975144209858469968755291048747229615390820")


def rope_frequencies(
    base: float, n_rot: int, factors: np.ndarray[Any, Any] | Sequence[float] | None = None
) -> F64:
    """base^(-2i/n_rot), divided by factors[i] where given: float64 [n_rot/2], rounded once.

    Raises: GraphError for a base or a factor that is not a finite number above zero.
    """
    if not 0 < base < math.inf:
        raise GraphError("bad rope base", got=base, wanted="a finite number above 0")
    context = Context(prec=50)
    log_base = context.ln(Decimal(base))
    divisors = [1.0] * (n_rot // 2) if factors is None else [float(f) for f in factors]
    if len(divisors) != n_rot // 2 or not all(0 < f < math.inf for f in divisors):
        raise GraphError("bad rope factors", wanted=f"{n_rot // 2} finite numbers above 0")
    frequencies = []
    for i, divisor in enumerate(divisors):
        exponent = context.divide(context.multiply(log_base, Decimal(-2 * i)), Decimal(n_rot))
        frequencies.append(float(context.divide(context.exp(exponent), Decimal(divisor))))
    return np.array(frequencies, dtype=np.float64)


def rope_table(positions: np.ndarray[Any, Any], frequencies: F64) -> tuple[F32, F32]:
    """Cosine and sine of position * frequency, float32 [n, n_rot/2] each.

    Every entry is the f32 next to the true value, or a tie's neighbour: the error before the one
    rounding to f32 is below 2^-50 relative.

    Raises: GraphError for negative positions, or angles of `MAX_ANGLE` and more.
    """
    positions = np.asarray(positions, dtype=np.int64)
    if positions.size and (
        positions.min() < 0 or positions.max() * max(1.0, frequencies.max()) >= MAX_ANGLE
    ):
        raise GraphError(
            "a position is out of the range of rope",
            got=f"{positions.min()} to {positions.max()}",
            wanted=f"0 to below {MAX_ANGLE}",
        )
    quadrant, r = _reduced(positions.astype(np.float64)[:, None], frequencies)
    sine, cosine = _sin_cos(r)
    swap = quadrant % 2 == 1
    cos = np.where(swap, sine, cosine)
    sin = np.where(swap, cosine, sine)
    cos = np.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    sin = np.where(quadrant >= 2, -sin, sin)
    return cos.astype(np.float32), sin.astype(np.float32)


def _split(value: Fraction, bits: int) -> tuple[float, Fraction]:
    """The leading `bits` bits as a float, and what is left."""
    exponent = bits - 1 - math.frexp(float(value))[1] + 1
    head = Fraction(math.floor(value * 2**exponent), 1) / 2**exponent
    return float(head), value - head


# pi/2 in three pieces of 28 bits, so that k * piece is exact for k < 2^25, and a tail.
_P1, _rest = _split(_HALF_PI, 28)
_P2, _rest = _split(_rest, 28)
_P3, _rest = _split(_rest, 28)
_P4 = float(_rest)
_TWO_OVER_PI = float(1 / _HALF_PI)


def _two_sum(a: F64, b: F64) -> tuple[F64, F64]:
    """a + b as a rounded sum and its exact error (Knuth, TAOCP 2, 4.2.2, theorem B)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _reduced(positions: F64, frequencies: F64) -> tuple[np.ndarray[Any, Any], F64]:
    """The angle's quadrant, 0 to 3, and the angle less that many right angles, in [-pi/4, pi/4].

    position * frequency is kept exactly as high + low: 24 + 29 bits and 24 + 24 bits. The angle
    less k * P1 is then exact, and the other pieces follow with their rounding errors kept.
    """
    head = _truncated(frequencies)
    high, low = positions * head, positions * (frequencies - head)
    k = np.rint((high + low) * _TWO_OVER_PI)
    r, e1 = _two_sum(high - k * _P1, low)
    r, e2 = _two_sum(r, -(k * _P2))
    r, e3 = _two_sum(r, -(k * _P3))
    r = r + (((e1 + e2) + e3) - k * _P4)
    return k.astype(np.int64) % 4, r


def _truncated(x: F64) -> F64:
    """The leading 29 bits of each number."""
    mask = np.uint64(0xFFFFFFFFFF000000)
    return (x.view(np.uint64) & mask).view(np.float64)


_SIN = [(-1) ** n / math.factorial(2 * n + 1) for n in range(10)]
_COS = [(-1) ** n / math.factorial(2 * n) for n in range(10)]


def _sin_cos(r: F64) -> tuple[F64, F64]:
    """Taylor series on [-pi/4, pi/4]: the first term left out is below 1e-20."""
    square = r * r
    sine, cosine = np.full_like(r, _SIN[-1]), np.full_like(r, _COS[-1])
    for n in range(len(_SIN) - 2, 0, -1):
        sine = sine * square + _SIN[n]
        cosine = cosine * square + _COS[n]
    return r + r * (square * sine), 1.0 + square * cosine
