"""If these break, a divergence is that of the file's rounding and not of the models."""

from __future__ import annotations

import numpy as np
import pytest

from ignis.errors import NumericsError, UsageError
from ignis.perplexity.estimate import (
    Divergence,
    Estimate,
    RunningPerplexity,
    as_scores,
    perplexity_of,
)
from ignis.perplexity.rows import Row, RowScore
from ignis.perplexity.windows import Windows

V = 3000


def log_softmax(logits):
    """In float64, by the definition."""
    exact = np.asarray(logits, np.float64)
    exact = exact - exact.max()
    return exact - np.log(np.exp(exact).sum())


@pytest.fixture(params=[0.5, 3.0, 12.0, 60.0], ids=lambda spread: f"spread{spread}")
def logits(request):
    """From nearly flat to one token that is certain."""
    rng = np.random.default_rng(1)
    return rng.normal(7, request.param, V).astype(np.float32)


def test_probabilities_are_those_of_the_definition(logits):
    row = Row.of(logits)
    wanted = log_softmax(logits)
    for token in (0, 17, V - 1, int(logits.argmax())):
        assert row.log_prob(token) == pytest.approx(wanted[token], abs=1e-5)


def test_a_run_does_not_diverge_from_its_own_record(logits):
    """The floor of what can be measured: 16-bit codes must not look like a difference."""
    row = Row.of(logits)
    score = row.score(5, row.record(5))
    assert abs(score.kl) < 1e-6 and score.same_top
    assert score.log_prob == score.base_log_prob


def test_the_floor_is_far_below_what_formats_differ_by():
    """Mean over many positions; half precision is at 1e-6."""
    rng = np.random.default_rng(2)
    rows = [Row.of(rng.normal(0, 4, V).astype(np.float32)) for _ in range(100)]
    assert abs(np.mean([row.score(0, row.record(0)).kl for row in rows])) < 5e-8


def test_divergence_is_that_of_the_definition(logits):
    rng = np.random.default_rng(3)
    other = logits + rng.normal(0, 0.3, V).astype(np.float32)
    p, q = log_softmax(logits), log_softmax(other)
    score = Row.of(other).score(9, Row.of(logits).record(9))
    assert score.kl == pytest.approx(float((np.exp(p) * (p - q)).sum()), rel=1e-3, abs=1e-6)
    assert score.base_log_prob == pytest.approx(p[9], abs=1e-5)
    assert score.same_top == (p.argmax() == q.argmax())


def test_equal_logits_and_far_ones_have_codes():
    flat = Row.of(np.full(V, 3, np.float32)).record(4)
    assert flat.step == 0 and not flat.codes.any()
    wide = np.zeros(V, np.float32)
    wide[7] = 500
    record = Row.of(wide).record(7)
    assert (record.top, record.codes[7], record.codes[0]) == (7, 0, 65535)
    assert record.step == pytest.approx(32 / 65535)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_one_line(bad):
    logits = np.zeros(V, np.float32)
    logits[11] = bad
    with pytest.raises(NumericsError, match="not finite"):
        Row.of(logits)


def test_estimates_are_those_of_the_formulas():
    scores = as_scores([RowScore(-1.0, -1.5, 0.1), RowScore(-2.0, -1.0, 0.3, same_top=False),
                        RowScore(-3.0, -3.5, 0.2)])
    perplexity = perplexity_of(scores)
    assert perplexity.value == pytest.approx(np.exp(2))
    assert perplexity.error == pytest.approx(np.exp(2) * 1 / np.sqrt(3))
    found = Divergence.of(scores)
    assert found.base_perplexity.value == pytest.approx(np.exp(2))
    assert found.ratio.value == pytest.approx(1)
    # The error of the ratio is that of the paired differences -0.5, 1, -0.5.
    assert found.ratio.error == pytest.approx(np.std([-0.5, 1, -0.5], ddof=1) / np.sqrt(3))
    assert (found.kl.value, found.kl_median, found.kl_max) == pytest.approx((0.2, 0.2, 0.3))
    assert found.kl_999 == pytest.approx(0.3, abs=1e-3)
    assert found.same_top.value == pytest.approx(2 / 3)
    differences = np.exp([-1, -2, -3]) - np.exp([-1.5, -1, -3.5])
    assert found.rms_probability.value == pytest.approx(np.sqrt((differences**2).mean()))


def test_the_running_value_ends_as_the_final_one():
    rng = np.random.default_rng(4)
    scores = as_scores(RowScore(float(x)) for x in rng.normal(-3, 2, 1000))
    running, wanted = RunningPerplexity(), perplexity_of(scores)
    for part in np.split(scores, [1, 400, 990]):
        found = running.add(part)
    assert found.value == pytest.approx(wanted.value)
    assert found.error == pytest.approx(wanted.error)


def test_one_position_has_no_error_bar():
    assert Estimate.of(np.array([2.0])) == Estimate(2.0, np.inf)


def test_windows_are_cut_as_by_llama_cpp():
    """The first token of each gives way to BOS; the second half but its first is scored."""
    windows = Windows(np.arange(100, 118, dtype=np.int32), 8, first_id=1)
    assert (windows.n_windows, windows.n_unscored, windows.n_scored) == (2, 4, 3)
    assert windows.fed(0) == [1, 101, 102, 103, 104, 105, 106]
    assert windows.fed(1) == [1, 109, 110, 111, 112, 113, 114]
    assert windows.targets(1).tolist() == [113, 114, 115]
    assert Windows(windows.ids, 9).fed(0)[0] == 100
    assert Windows(windows.ids, 9).targets(1).tolist() == [114, 115, 116, 117]


def test_windows_that_cannot_be_are_one_line():
    with pytest.raises(UsageError, match="too short to be scored: got 18 tokens, wanted 19"):
        Windows(np.zeros(18, np.int32), 19)
    with pytest.raises(UsageError, match="got 7 tokens, wanted 8 or more"):
        Windows(np.zeros(18, np.int32), 7)
