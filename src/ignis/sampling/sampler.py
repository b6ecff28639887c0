"""One token from one row of logits.

The steps, in this order (each is skipped where its parameter switches it off):

    1. repeat_penalty  logits of the last `repeat_last_n` ids: divided where positive, multiplied
                       where negative
    2. greedy          temperature 0: the largest logit, the lowest id among equals; no draw
    3. top_k           the k largest logits stay, the lowest ids among equals
    4. top_p           the shortest run of largest probabilities that reaches p stays
    5. min_p           probabilities of at least p times the largest stay
    6. temperature     logits are divided by it
    7. draw            one number u of the stream; in ascending order of id, the first candidate
                       whose cumulated weight exceeds u times the sum of all weights

All arithmetic is float64 with exactly rounded operations in a fixed order (sums run from left to
right), so that the same seed gives the same text on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from ignis.errors import NumericsError, UsageError
from ignis.sampling.exponential import exp_nonpositive
from ignis.sampling.stream import MAX_SEED, RandomStream, fresh_seed

Float64s = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class Sampler:
    """How tokens are chosen, and the random stream that chooses.

    temperature     0: greedy; otherwise logits are divided by it
    top_k           keep the k most probable tokens; 0: all
    top_p           keep the most probable tokens that together reach this share; 1: all
    min_p           keep tokens of at least this share of the most probable one; 0: all
    repeat_penalty  above 1: tokens of the last `repeat_last_n` become less likely; 1: off
    repeat_last_n   how many ids back the penalty looks; -1: all; 0: off
    seed            0 to 2^64 - 1; None: a fresh one, to be read from `seed`

    Raises `UsageError` for parameters that make no sense.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None
    _stream: RandomStream = field(init=False, repr=False)
    _n_sampled: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, lambda x: x >= 0, "0 or more")
        _check_integer("top_k", self.top_k, 0, None)
        _check_number("top_p", self.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1")
        _check_number("min_p", self.min_p, lambda x: 0 <= x <= 1, "0 to 1")
        _check_number("repeat_penalty", self.repeat_penalty, lambda x: x > 0, "above 0")
        _check_integer("repeat_last_n", self.repeat_last_n, -1, None)
        if self.seed is None:
            self.seed = fresh_seed()
        _check_integer("seed", self.seed, 0, MAX_SEED)
        self._stream = RandomStream(self.seed)

    def sample(self, logits: npt.NDArray[np.float32], history: Sequence[int]) -> int:
        """The id of the next token.

        `logits` is float32 [V]; -inf forbids a token. `history` are the ids before it, the prompt
        included. Raises `NumericsError` with the number of the step (0: the first token sampled)
        for NaN, +inf, or no allowed token at all.
        """
        step = self._n_sampled
        _check_logits(logits, step)
        self._n_sampled += 1
        scores = self._penalized(logits, history)
        if self.temperature == 0:
            return int(np.argmax(scores))  # the first of equals
        return self._draw(scores)

    def _penalized(
        self, logits: npt.NDArray[np.float32], history: Sequence[int]
    ) -> npt.NDArray[np.floating]:
        """Step 1, without touching the caller's array."""
        if self.repeat_penalty == 1 or self.repeat_last_n == 0 or not history:
            return logits
        recent = history if self.repeat_last_n < 0 else history[-self.repeat_last_n:]
        ids = np.array(sorted(set(recent)), np.int64)
        scores = logits.astype(np.float64)
        seen = scores[ids]
        scores[ids] = np.where(seen > 0, seen / self.repeat_penalty, seen * self.repeat_penalty)
        return scores

    def _draw(self, scores: npt.NDArray[np.floating]) -> int:
        """Steps 3 to 7."""
        candidates = self._candidates(scores.astype(np.float64))
        chosen = scores[candidates].astype(np.float64)
        with np.errstate(over="ignore"):  # a tiny temperature: -inf, weight 0, which is meant
            weights = exp_nonpositive((chosen - chosen.max()) / self.temperature)
        cumulated = np.cumsum(weights)
        bound = self._stream.next_uniform() * cumulated[-1]
        index = int(np.searchsorted(cumulated, bound, side="right"))
        # u * sum can round up to the sum itself; then it is the last token with any weight.
        last = int(np.searchsorted(cumulated, cumulated[-1], side="left"))
        return int(candidates[min(index, last)])

    def _candidates(self, scores: Float64s) -> Ids:
        """Steps 3 to 5: the ids that stay, ascending."""
        n_vocab = scores.size
        limit = min(self.top_k or n_vocab, n_vocab)
        if limit == n_vocab and self.top_p == 1 and self.min_p == 0:
            return np.arange(n_vocab)
        if limit < n_vocab:
            ids = _largest(scores, limit)
        elif self.top_p < 1:
            ids = np.arange(n_vocab)
        else:
            ids = np.arange(n_vocab)[scores > -np.inf]
        weights = exp_nonpositive(scores[ids] - scores.max())
        if self.top_p < 1:
            ids, weights = _nucleus(ids, weights, self.top_p)
        if self.min_p > 0:
            ids = ids[weights >= self.min_p]  # the largest weight is exactly 1
        return np.sort(ids)


def _largest(scores: Float64s, n: int) -> Ids:
    """The ids of the n largest scores in descending order, the lowest ids first among equals."""
    if n < scores.size:
        threshold = np.partition(scores, scores.size - n)[scores.size - n]
        ids = np.flatnonzero(scores >= threshold)
    else:
        ids = np.arange(scores.size)
    return ids[np.argsort(-scores[ids], kind="stable")[:n]]


def _nucleus(ids: Ids, weights: Float64s, share: float) -> tuple[Ids, Float64s]:
    """The shortest run of largest weights that reaches `share` of their sum.

    A full sort of a large vocabulary costs more than a decode step of a small model, and the run is
    nearly always short: so sort a few, and more only where they do not reach. The total is summed
    in the order of `ids`, the run in descending order.
    """
    wanted = share * np.cumsum(weights)[-1]
    n = 128
    while True:
        n = min(n, weights.size)
        order = _largest(weights, n)
        reached = np.cumsum(weights[order])
        n_kept = int(np.searchsorted(reached, wanted, side="left")) + 1
        if n_kept <= n or n == weights.size:
            return ids[order[:n_kept]], weights[order[:n_kept]]
        n *= 16


def _check_logits(logits: npt.NDArray[np.float32], step: int) -> None:
    assert logits.ndim == 1 and logits.size > 0
    largest = logits.max()  # NaN wins, so one pass finds every trouble
    if math.isfinite(largest):
        return
    where = f"logits of step {step}"
    if math.isinf(largest) and largest < 0:
        raise NumericsError("every token is forbidden", where=where, got="-inf only")
    token_id = int(np.flatnonzero(np.isnan(logits) | np.isposinf(logits))[0])
    raise NumericsError(f"not a number one can sample from at token id {token_id}", where=where,
                        got=float(logits[token_id]), wanted="finite",
                        hint="the weights are damaged, or this is a bug in Ignis")


def _check_number(
    name: str, value: object, in_range: Callable[[float], bool], wanted: str
) -> None:
    sound = isinstance(value, int | float) and not isinstance(value, bool)
    if not (sound and math.isfinite(cast(float, value)) and in_range(cast(float, value))):
        raise UsageError("bad sampling parameter", where=name, got=repr(value), wanted=wanted)


def _check_integer(name: str, value: object, low: int, high: int | None) -> None:
    sound = isinstance(value, int) and not isinstance(value, bool)
    if not (sound and low <= cast(int, value) and (high is None or cast(int, value) <= high)):
        wanted = f"an integer of {low} or more" if high is None else f"{low} to {high}"
        raise UsageError("bad sampling parameter", where=name, got=repr(value), wanted=wanted)
