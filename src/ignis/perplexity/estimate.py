"""From the scores of all positions to figures with their errors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ignis.perplexity.rows import RowScore

Scores: TypeAlias = NDArray[np.void]
"""One record a position, with the fields of `RowScore`."""

_RECORD: Any = [("log_prob", "f8"), ("base_log_prob", "f8"), ("kl", "f8"), ("same_top", "?")]


def as_scores(rows: Iterable[RowScore]) -> Scores:
    """The scores of some positions, in order."""
    return np.array([astuple(row) for row in rows], _RECORD)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over positions and its standard error, as if positions were independent."""

    value: float
    error: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Estimate:
        n = len(values)
        error = float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
        return cls(float(values.mean()), error)

    def exp(self) -> Estimate:
        """The estimate of exp(mean)."""
        value = _exp(self.value)
        return Estimate(value, value * self.error)

    def __str__(self) -> str:
        return f"{self.value:.4f} +/- {self.error:.4f}"


@dataclass(frozen=True, slots=True)
class Divergence:
    """A run against its base, position by position. Divergences are KL(base || run), in nats."""

    base_perplexity: Estimate
    ratio: Estimate  # of perplexities: run / base
    kl: Estimate
    kl_median: float
    kl_999: float  # 99.9 % of positions are below
    kl_max: float
    same_top: Estimate  # share of positions whose most probable token is the base's
    rms_probability: Estimate  # root mean square of p_run - p_base of the token that followed

    @classmethod
    def of(cls, scores: Scores) -> Divergence:
        own, base, kl = (scores[name] for name in ("log_prob", "base_log_prob", "kl"))
        top = scores["same_top"].astype(np.float64)
        squares = Estimate.of((np.exp(own) - np.exp(base)) ** 2)
        rms = math.sqrt(squares.value)
        return cls(
            Estimate.of(-base).exp(), Estimate.of(base - own).exp(), Estimate.of(kl),
            float(np.median(kl)), float(np.quantile(kl, 0.999)), float(kl.max()),
            Estimate.of(top), Estimate(rms, squares.error / (2 * rms) if rms else 0.0),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """What a run found. `against_base` is None where there was no base."""

    perplexity: Estimate
    n_ctx: int
    n_windows: int
    n_scored: int  # tokens
    n_fed: int  # tokens that the model read
    seconds: float
    against_base: Divergence | None = None


def perplexity_of(scores: Scores) -> Estimate:
    """exp of the mean negative log-probability of what followed."""
    return Estimate.of(-scores["log_prob"]).exp()


class RunningPerplexity:
    """The perplexity so far, without looking at all positions again."""

    def __init__(self) -> None:
        self._n, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, scores: Scores) -> Estimate:
        """Count some more positions; the perplexity of all of them."""
        nll = -scores["log_prob"]
        self._n += len(nll)
        self._sum += float(nll.sum())
        self._squares += float((nll**2).sum())
        mean = self._sum / self._n
        variance = max(self._squares / self._n - mean**2, 0.0)
        error = math.sqrt(variance / (self._n - 1)) if self._n > 1 else math.inf
        return Estimate(mean, error).exp()


def _exp(x: float) -> float:
    """exp, infinite where a model is that bad."""
    return math.exp(x) if x < 709 else math.inf
