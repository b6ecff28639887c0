"""Rope tables against 60-digit decimal arithmetic: correctly rounded, at every size of angle."""

from __future__ import annotations

from decimal import Context, Decimal, localcontext

import numpy as np
import pytest

from ignis.errors import GraphError
from ignis.graph.ir.rope import MAX_ANGLE, RopeScaling, rope_frequencies, rope_table

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")


def _sin(x: Decimal) -> Decimal:
    """The Taylor series after reduction, in the current decimal context."""
    x %= 2 * PI
    term = total = x
    n = 1
    while abs(term) > Decimal("1e-40"):
        term *= -x * x / ((n + 1) * (n + 2))
        total += term
        n += 2
    return total


def _ulps(got: np.float32, true: Decimal) -> float:
    spacing = Decimal(float(np.spacing(np.abs(got))))
    return float(abs(Decimal(float(got)) - true) / spacing)


@pytest.mark.parametrize(("base", "n_rot"), [(1e4, 128), (1e5, 64), (1e6, 64), (5e5, 32)])
def test_table_is_correctly_rounded(base: float, n_rot: int) -> None:
    """Bits would depend on the machine's libm, or be wrong at long contexts."""
    rng = np.random.default_rng(int(base))
    frequencies = rope_frequencies(base, n_rot)
    positions = np.concatenate([np.arange(8), rng.integers(0, 2**20, 40), [2**20, MAX_ANGLE - 1]])
    cos, sin = rope_table(positions, frequencies)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (len(positions), n_rot // 2)
    with localcontext(Context(prec=60)):
        for i, position in enumerate(positions):
            for j in rng.integers(0, n_rot // 2, 4):
                angle = int(position) * Decimal(float(frequencies[j]))
                assert _ulps(sin[i, j], _sin(angle)) < 0.5 + 2**-20
                assert _ulps(cos[i, j], _sin(angle + PI / 2)) < 0.5 + 2**-20


def test_every_position_agrees_with_libm_to_an_ulp() -> None:
    """A quadrant mixed up at one angle in a million."""
    positions = np.arange(0, 2**20, 11)
    frequencies = rope_frequencies(10000.0, 8)
    cos, sin = rope_table(positions, frequencies)
    angle = positions[:, None] * frequencies
    np.testing.assert_allclose(sin, np.sin(angle), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(cos, np.cos(angle), rtol=1e-7, atol=1e-9)


def test_angles_next_to_a_multiple_of_half_pi() -> None:
    """Cancellation would leave few bits: 355/113 and its like are the worst integers."""
    positions = np.array([11, 22, 33, 355, 710, 1065, 104348, 208341, 312689, 833719, 5419351])
    cos, sin = rope_table(positions, np.array([1.0]))
    with localcontext(Context(prec=60)):
        for i, position in enumerate(positions):
            assert _ulps(sin[i, 0], _sin(Decimal(int(position)))) < 0.5 + 2**-20
            assert _ulps(cos[i, 0], _sin(int(position) + PI / 2)) < 0.5 + 2**-20


def test_frequencies_are_rounded_once() -> None:
    """pow from libm differs by an ulp between systems."""
    assert rope_frequencies(1e4, 64)[0] == 1.0
    with localcontext(Context(prec=60)):
        for i, frequency in enumerate(rope_frequencies(1e4, 64)):
            true = Decimal(10) ** (Decimal(-8 * i) / 64)
            error = abs(Decimal(float(frequency)) - true)
            assert error <= Decimal(float(np.spacing(frequency))) / 2


def test_factors_divide() -> None:
    plain = rope_frequencies(5e5, 8)
    factors = np.array([1, 2, 4, 8], dtype=np.float32)
    assert rope_frequencies(5e5, 8, factors).tolist() == (plain / factors).tolist()


def test_position_zero_turns_nothing() -> None:
    cos, sin = rope_table(np.zeros(1, dtype=np.int64), rope_frequencies(1e4, 64))
    assert (cos == 1).all()
    assert (sin == 0).all()
    assert rope_table(np.zeros(0, dtype=np.int64), rope_frequencies(1e4, 64))[0].shape == (0, 32)


def test_bad_arguments() -> None:
    frequencies = rope_frequencies(1e4, 8)
    for positions in ([-1], [MAX_ANGLE]):
        with pytest.raises(GraphError, match="out of the range"):
            rope_table(np.array(positions), frequencies)
    for base in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(GraphError, match="bad rope base"):
            rope_frequencies(base, 8)
    for factors in ([1.0] * 3, [0.0] * 4, [float("nan")] * 4):
        with pytest.raises(GraphError, match="bad rope factors"):
            rope_frequencies(1e4, 8, factors)


def test_linear_scaling_divides_every_frequency() -> None:
    stretched = rope_frequencies(1e6, 64, None, RopeScaling(8.0))
    assert np.array_equal(stretched, rope_frequencies(1e6, 64) / 8)  # exact: a power of two
    assert RopeScaling(8.0).attributes == {"divisor": 8.0}


def test_yarn_keeps_fast_pairs_and_slows_the_others() -> None:
    """The worked figures of a model of 8192 positions stretched four times."""
    scaling = RopeScaling.yarn(4.0, 10000.0, 32, 8192)
    # 32 ln(8192 / (32 * 2 pi)) / (2 ln 10000) = 6.44, and with 1 in place of 32 it is 12.46.
    assert (scaling.ramp_low, scaling.ramp_high) == (6, 13)
    assert scaling.magnitude == pytest.approx(1 + np.log(4) / 10, rel=1e-15)
    plain, stretched = rope_frequencies(1e4, 32), rope_frequencies(1e4, 32, None, scaling)
    assert np.array_equal(stretched[:7], plain[:7])
    assert np.array_equal(stretched[13:], plain[13:] / 4)
    share = (np.arange(7, 13) - 6) / 7
    wanted = plain[7:13] * (share / 4 + 1 - share)
    np.testing.assert_allclose(stretched[7:13], wanted, rtol=1e-15)
    assert RopeScaling.of(scaling.attributes) == scaling
    assert RopeScaling.yarn(1.0, 10000.0, 32, 8192).attributes == {}


def test_a_magnitude_is_rounded_once() -> None:
    positions, frequencies = np.arange(50), rope_frequencies(1e4, 16)
    cos, _ = rope_table(positions, frequencies, 1.25)
    angle = positions[:, None] * frequencies
    assert (np.abs(cos - 1.25 * np.cos(angle)) <= 0.51 * np.spacing(np.abs(cos))).all()
