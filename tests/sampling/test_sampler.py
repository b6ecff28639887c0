"""If these break, text is drawn from another distribution than the one the user asked for."""

import numpy as np
import pytest

from ignis.errors import NumericsError, UsageError
from ignis.sampling import Sampler

GOLDEN_PLAIN = [45, 29, 39, 30, 48, 44, 32, 45, 34, 42, 43, 48]
GOLDEN_FILTERED = [47, 40, 43, 39, 48, 45, 40, 46, 40, 44, 44, 49]


def draws(logits, n=4000, history=(), **parameters):
    """The share of each id in n draws with a fixed seed."""
    sampler = Sampler(seed=11, **parameters)
    row = np.array(logits, np.float32)
    ids = [sampler.sample(row, list(history)) for _ in range(n)]
    return np.bincount(ids, minlength=row.size) / n


def probabilities(*weights):
    return np.log(np.array(weights)).astype(np.float32)


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals():
    sampler = Sampler()
    assert sampler.sample(np.array([1, 3, 2, 3, -np.inf], np.float32), []) == 1
    assert sampler.sample(np.zeros(100, np.float32), []) == 0


def test_greedy_draws_nothing_from_the_stream():
    sampler = Sampler(seed=5)
    for _ in range(3):
        sampler.sample(np.zeros(4, np.float32), [])
    assert sampler._stream.n_drawn == 0


def test_temperature_one_draws_the_softmax():
    shares = draws(probabilities(0.5, 0.3, 0.15, 0.05), temperature=1.0)
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_temperature_half_squares_the_odds():
    shares = draws(probabilities(0.5, 0.25, 0.25), temperature=0.5)
    np.testing.assert_allclose(shares, np.array([4, 1, 1]) / 6, atol=0.03)


def test_a_tiny_temperature_is_greedy_without_warnings():
    assert draws([1.0, 2.0, -3e38, 1.5], n=20, temperature=1e-300)[1] == 1


def test_top_k_keeps_k_and_the_lowest_ids_among_equals():
    shares = draws([1.0, 1.0, 1.0, 1.0], temperature=1.0, top_k=2)
    np.testing.assert_allclose(shares, [0.5, 0.5, 0, 0], atol=0.03)
    assert draws([0.0, 0.0, 1.0], n=50, temperature=1.0, top_k=1)[2] == 1


def test_top_k_larger_than_the_vocabulary_is_off():
    assert (draws([0.0, 0.0], temperature=1.0, top_k=50) > 0.4).all()


def test_top_p_keeps_the_shortest_run_that_reaches_it():
    logits = probabilities(0.1, 0.5, 0.25, 0.15)
    np.testing.assert_allclose(draws(logits, temperature=1.0, top_p=0.7), [0, 2 / 3, 1 / 3, 0],
                               atol=0.03)
    assert draws(logits, n=50, temperature=1.0, top_p=0.01)[1] == 1


def test_top_p_over_a_flat_distribution_widens_its_search():
    """More candidates than the first partial sort holds."""
    shares = draws(np.zeros(5000), n=300, temperature=1.0, top_p=0.5)
    assert shares[2500:].sum() == 0 and (shares > 0).sum() > 250


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_the_partial_sort_keeps_what_a_full_sort_keeps(top_p):
    row = np.random.default_rng(3).normal(0, 2, 4000).astype(np.float32).round(1)
    order = np.argsort(-row.astype(np.float64), kind="stable")
    weights = np.exp(row[order].astype(np.float64))
    n_kept = int(np.searchsorted(np.cumsum(weights) / weights.sum(), top_p)) + 1
    got = Sampler(temperature=1.0, top_p=top_p, seed=0)._candidates(row.astype(np.float64))
    assert got.tolist() == sorted(order[:n_kept])


def test_min_p_is_relative_to_the_most_probable():
    shares = draws(probabilities(0.6, 0.3, 0.08, 0.02), temperature=1.0, min_p=0.2)
    np.testing.assert_allclose(shares, [2 / 3, 1 / 3, 0, 0], atol=0.03)


def test_forbidden_tokens_are_never_drawn():
    row = [-np.inf, 0.0, -np.inf, 0.0]
    for parameters in ({}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}):
        shares = draws(row, n=300, temperature=1.0, **parameters)
        assert shares[0] == shares[2] == 0


def test_the_penalty_divides_positive_and_multiplies_negative_logits():
    sampler = Sampler(repeat_penalty=2.0)
    assert sampler.sample(np.array([3.0, 2.0], np.float32), [0]) == 1
    assert sampler.sample(np.array([-1.0, -1.5], np.float32), [0]) == 1


def test_the_penalty_sees_only_the_last_ids_and_leaves_the_logits_alone():
    row = np.array([3.0, 2.0, 0.0], np.float32)
    assert Sampler(repeat_penalty=2.0, repeat_last_n=2).sample(row, [0, 2, 2]) == 0
    assert Sampler(repeat_penalty=2.0, repeat_last_n=-1).sample(row, [0, 2, 2]) == 1
    assert Sampler(repeat_penalty=2.0, repeat_last_n=0).sample(row, [0, 0]) == 0
    assert row.tolist() == [3.0, 2.0, 0.0]


def test_golden_tokens():
    """The same seed gives the same ids on any machine: these must never change."""
    row = np.arange(50, dtype=np.float32) / 10
    plain, filtered = (Sampler(temperature=0.9, seed=2024, **more) for more in (
        {}, {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "repeat_penalty": 1.1}))
    assert [plain.sample(row, []) for _ in range(12)] == GOLDEN_PLAIN
    history: list[int] = []
    for _ in range(12):
        history.append(filtered.sample(row, history))
    assert history == GOLDEN_FILTERED


def test_a_seed_repeats_and_none_is_fresh_and_readable():
    row = np.zeros(1000, np.float32)
    one, two = Sampler(temperature=1.0), Sampler(temperature=1.0)
    assert one.seed is not None and one.seed != two.seed
    again = Sampler(temperature=1.0, seed=one.seed)
    assert [one.sample(row, []) for _ in range(5)] == [again.sample(row, []) for _ in range(5)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_that_are_none_are_an_error_that_names_the_step(bad, temperature):
    sampler = Sampler(temperature=temperature, seed=0)
    sampler.sample(np.zeros(4, np.float32), [])
    with pytest.raises(NumericsError, match=f"step 1: .*token id 2: got {bad}"):
        sampler.sample(np.array([0, 1, bad, -np.inf], np.float32), [])


def test_no_allowed_token_is_an_error():
    with pytest.raises(NumericsError, match="step 0: every token is forbidden"):
        Sampler().sample(np.full(3, -np.inf, np.float32), [])


@pytest.mark.parametrize("parameter", [
    {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": "hot"},
    {"top_k": -1}, {"top_k": 1.5}, {"top_k": True}, {"top_p": 0.0}, {"top_p": 1.01},
    {"min_p": -0.1}, {"min_p": 1.5}, {"repeat_penalty": 0.0}, {"repeat_penalty": float("inf")},
    {"repeat_last_n": -2}, {"seed": -1}, {"seed": 2**64}])
def test_parameters_without_sense_are_named(parameter):
    with pytest.raises(UsageError, match=next(iter(parameter))):
        Sampler(**parameter)
