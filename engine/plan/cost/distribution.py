"""How long rows are: distributions of token counts, and draws from them.

Owns: the distributions, their survival curves and keyed draws. Does not own: the greatest lengths
(lengths.py), what a row of some length costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from dataflow.errors import PlanError

POINTS = 1024
"""Equally likely lengths by which a continuous distribution is represented."""
_HALVINGS = 20
"""Of an interval, by bisection."""

_ASSUMED_MEDIAN, _ASSUMED_SIGMA = 0.15, 0.9
"""Of answers of which nothing is known but the longest: their median, as a share of that, and the
width of their logarithm. Those of `lognormal:3000,0.9,20000`, the order in which lengths of
reasoning Models have been reported (AReaL, arXiv:2505.24298; StreamRL, arXiv:2504.15930).
"""


@dataclass(frozen=True, slots=True, eq=False)
class LengthDistribution:
    """So many equally likely lengths, ascending; int64, at least one, none below 1."""

    lengths: np.ndarray

    @property
    def mean(self) -> float:
        """Tokens of a row, in the mean."""
        return float(self.lengths.mean())

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths[-1])

    def survival(self, tokens: np.ndarray) -> np.ndarray:
        """float64: the share of rows that are longer than so many tokens."""
        return 1.0 - np.searchsorted(self.lengths, tokens, side="right") / len(self.lengths)

    def at(self, quantiles: np.ndarray) -> np.ndarray:
        """int64: the length at each quantile, 0 to 1, so that uniform draws become lengths."""
        index = np.floor(quantiles * len(self.lengths)).astype(np.int64)
        return self.lengths[np.clip(index, 0, len(self.lengths) - 1)]

    def spread(self, rows: int) -> np.ndarray:
        """Pick lengths that stand for so many rows, int64 [rows], in an order of no meaning, the
        same at each call.
        """
        middle = (np.arange(rows) + 0.5) / rows
        # Long and short rows come mixed, as in a batch: a fixed permutation by the golden ratio.
        fractions, _ = np.modf(np.arange(rows) * 0.6180339887498949)
        order = np.argsort(fractions, kind="stable")
        return self.at(middle)[order]

    def cap(self, tokens: int) -> LengthDistribution:
        """Cut every row at so many tokens."""
        return LengthDistribution(np.minimum(self.lengths, tokens))


def constant_length(tokens: int) -> LengthDistribution:
    """Give every row so many tokens. Raises PlanError below 1."""
    return of_lengths(np.array([tokens]))


def lognormal(median: float, sigma: float, longest: int) -> LengthDistribution:
    """Represent exp(N(ln median, sigma)), cut at `longest`, by POINTS quantiles. Raises PlanError
    for impossible values.
    """
    if not (median >= 1 and sigma >= 0 and longest >= 1):
        problem = "expected a median and a greatest length of at least 1 and a sigma of at least 0"
        numbers = f"found {median:g}, {longest}, {sigma:g}"
        raise PlanError(f"lengths: {problem}, {numbers}. Fix: lognormal:3000,0.9,20000.")
    log_median = float(np.log(median))
    if sigma:
        normal = NormalDist(log_median, sigma)
        quantiles = (np.arange(POINTS) + 0.5) / POINTS
        logarithms = [normal.inv_cdf(quantile) for quantile in quantiles]
    else:  # a normal distribution without a width has no quantiles
        logarithms = [log_median] * POINTS
    tokens = np.clip(np.rint(np.exp(logarithms)), 1, longest)
    return LengthDistribution(np.sort(tokens).astype(np.int64))


def assumed_answers(longest: int) -> LengthDistribution:
    """Assume how long answers are of which only the longest is known. A guess."""
    return lognormal(max(1.0, _ASSUMED_MEDIAN * longest), _ASSUMED_SIGMA, longest)


def assume_mean(mean: float, longest: int) -> LengthDistribution:
    """Assume how long answers are of which the mean and the longest are known: as `assumed_answers`
    does, with another median.
    """
    if mean >= longest:
        return constant_length(longest)
    least, most = 1.0, float(longest)
    while lognormal(most, _ASSUMED_SIGMA, longest).mean < mean:
        least, most = most, 2.0 * most
    for _ in range(_HALVINGS):
        middle = (least + most) / 2.0
        if lognormal(middle, _ASSUMED_SIGMA, longest).mean < mean:
            least = middle
        else:
            most = middle
    return lognormal(most, _ASSUMED_SIGMA, longest)


def of_lengths(lengths: np.ndarray) -> LengthDistribution:
    """Make the distribution of rows that were seen. Raises PlanError where there are none, or one
    below 1.
    """
    if len(lengths) == 0:
        raise _lengths_error("none")
    if lengths.min() < 1:
        raise _lengths_error(f"one of {lengths.min()}")
    return LengthDistribution(np.sort(np.asarray(lengths, dtype=np.int64)))


def _lengths_error(seen: str) -> PlanError:
    problem = f"expected lengths of at least 1 token, found {seen}"
    return PlanError(f"lengths: {problem}. Fix: give those of a run with rows.")
