"""One position at a time: what its logits say of the token that followed.

Distributions are kept as codes: 16-bit steps below the most probable token, with the step in f32.

    log p_i = -step * code_i - log(sum_j exp(-step * code_j))

Since they are normalised anew when they are read, rounding moves a divergence only in second
order, by step^2 / 24: at most 1e-8 with steps of at most 32 / 65535. Tokens that are more than
e^32 times less probable than the first are kept as if they were so much less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ignis.errors import NumericsError

_MAX_CODE = 65535
_RANGE = 32.0  # nats below the most probable token


@dataclass(frozen=True, slots=True, eq=False)
class RowRecord:
    """What a base file keeps of a position: `codes` is uint16 [V]."""

    log_prob: float  # of the token that followed, nats
    top: int  # the most probable token; codes of near ones may be equal
    step: float
    codes: NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class RowScore:
    """A position against its base; `log_prob` as in RowRecord, `kl` in nats."""

    log_prob: float
    base_log_prob: float = 0.0
    kl: float = 0.0
    same_top: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Logits of one position below their largest: f32 [V], and log(sum(exp(.)))."""

    below: NDArray[np.float32]
    log_sum: float
    top: int
    lowest: float

    @classmethod
    def of(cls, logits: NDArray[np.float32]) -> Row:
        """Raises NumericsError for logits that are no numbers."""
        top = int(logits.argmax())  # a NaN counts as the largest
        lowest = float(logits.min())
        if not (math.isfinite(logits[top]) and math.isfinite(lowest)):
            raise NumericsError("logits are not finite", where="perplexity",
                                hint="the model's weights may be damaged")  # fmt: skip
        below = logits - logits[top]
        # NumPy adds pairwise: the error stays near one part in ten million.
        log_sum = math.log(float(np.exp(below).sum()))
        return cls(below, log_sum, top, lowest - float(logits[top]))

    def log_prob(self, token: int) -> float:
        """The logarithm of a token's probability, in nats."""
        return float(self.below[token]) - self.log_sum

    def record(self, target: int) -> RowRecord:
        """The distribution as codes, and the probability of `target` as it is."""
        step = np.float32(min(-self.lowest, _RANGE) / _MAX_CODE)
        if step == 0:
            codes = np.zeros(len(self.below), np.uint16)
        else:
            steps = np.rint(self.below * np.float32(-1 / step))
            codes = np.minimum(steps, np.float32(_MAX_CODE)).astype(np.uint16)
        return RowRecord(self.log_prob(target), self.top, float(step), codes)

    def score(self, target: int, base: RowRecord) -> RowScore:
        """This distribution against the base's, and both on the token that followed."""
        distance = base.codes * np.float32(base.step)
        weights = np.exp(-distance)
        total = float(weights.sum())
        # sum(p * (log p - log q)), with what does not depend on the token taken out of the sum.
        distance += self.below
        distance *= weights
        kl = self.log_sum - math.log(total) - float(distance.sum()) / total
        return RowScore(self.log_prob(target), base.log_prob, kl, self.top == base.top)
