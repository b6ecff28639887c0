"""Rope frequencies, cosines and sines with the same bits on every machine.

No libm and no NumPy transcendental: frequencies come from exact decimal arithmetic, cosines and
sines from polynomials in f64 over a reduced angle, using only + - * and rint, each of which
IEEE 754 rounds in one way. What reaches a kernel is rounded once to f32 (NUMERICS 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ignis.errors import GraphError

F64: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
F32: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

MAX_ANGLE = 2**24
"""Positions times frequency must stay below this: the reduction is exact up to here."""

_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781641")
_HALF_PI = Fraction("1.57079632679489661923132169163975144209858469968755291048747229615390820")


class RopeScaling(NamedTuple):
    """How a model was stretched to a longer context.

    `divisor` divides all angles (linear interpolation). YaRN (arXiv 2309.00071, 3.2) leaves the
    fast pairs below `ramp_low` alone, slows those above `ramp_high` by the divisor, and mixes
    linearly between; it also makes the rotated values larger, by `magnitude`.
    """

    divisor: float = 1.0
    ramp_low: int | None = None
    ramp_high: int | None = None
    magnitude: float = 1.0

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> RopeScaling:
        """The scaling that a rope op's attributes say."""
        names = ("divisor", "ramp_low", "ramp_high", "magnitude")
        return cls(**{name: attributes[name] for name in names if name in attributes})

    @property
    def attributes(self) -> dict[str, float | int]:
        """The attributes of a rope op that say the same; none for what changes nothing."""
        said: dict[str, float | int] = {}
        if self.divisor != 1:
            said["divisor"] = self.divisor
            if self.ramp_low is not None and self.ramp_high is not None:
                said |= {"ramp_low": self.ramp_low, "ramp_high": self.ramp_high}
        if self.magnitude != 1:
            said["magnitude"] = self.magnitude
        return said

    @classmethod
    def yarn(
        cls, factor: float, base: float, n_rot: int, n_ctx: int, *, beta_fast: float = 32.0,
        beta_slow: float = 1.0, magnitude: float = 1.0,
    ) -> RopeScaling:  # fmt: skip
        """YaRN from a model trained on `n_ctx` positions; `magnitude` comes on top of its own.

        Pairs that turn more than `beta_fast` times in n_ctx positions stay, those that turn less
        than `beta_slow` times are slowed.
        """
        context = Context(prec=50)

        def pair(n_turns: float) -> Decimal:
            ratio = context.divide(Decimal(n_ctx), context.multiply(Decimal(n_turns), 2 * _PI))
            return n_rot * context.ln(ratio) / (2 * context.ln(Decimal(base)))

        low, high = math.floor(pair(beta_fast)), math.ceil(pair(beta_slow))
        grown = float(1 + context.ln(Decimal(factor)) / 10) if factor > 1 else 1.0
        low, high = max(0, low), max(0, min(n_rot - 1, high))
        return cls(factor, low, high, grown * magnitude)

    def scaled(self, frequency: Decimal, pair: int, context: Context) -> Decimal:
        """The frequency of a pair that would turn at `frequency` unscaled."""
        slow = context.divide(frequency, Decimal(self.divisor))
        if self.ramp_low is None or self.ramp_high is None:
            return slow
        width = max(Decimal("0.001"), Decimal(self.ramp_high - self.ramp_low))
        ramp = context.divide(Decimal(pair - self.ramp_low), width)
        kept = 1 - min(Decimal(1), max(Decimal(0), ramp))
        return slow * (1 - kept) + frequency * kept


UNSCALED = RopeScaling()


def rope_frequencies(
    base: float,
    n_rot: int,
    factors: np.ndarray[Any, Any] | Sequence[float] | None = None,
    scaling: RopeScaling = UNSCALED,
) -> F64:
    """base^(-2i/n_rot), divided by factors[i] where given: float64 [n_rot/2], rounded once.

    `scaling` is applied to that; its magnitude is not part of a frequency.

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
        frequency = context.divide(context.exp(exponent), Decimal(divisor))
        frequencies.append(float(scaling.scaled(frequency, i, context)))
    return np.array(frequencies, dtype=np.float64)


def rope_table(
    positions: np.ndarray[Any, Any], frequencies: F64, magnitude: float = 1.0
) -> tuple[F32, F32]:
    """Cosine and sine of position * frequency, times `magnitude`, float32 [n, n_rot/2] each.

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
    return (magnitude * cos).astype(np.float32), (magnitude * sin).astype(np.float32)


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
