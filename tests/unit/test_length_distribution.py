"""Distributions of lengths: survival, quantiles and spreads agree; impossible ones are refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dataflow.errors import PlanError
from engine.plan.cost.distribution import LengthDistribution, constant_length, lognormal, of_lengths

DISTRIBUTIONS = st.one_of(
    st.integers(1, 10**6).map(constant_length),
    st.builds(lognormal, st.floats(1, 1e5), st.floats(0, 3), st.integers(1, 10**6)),
    st.lists(st.integers(1, 10**5), min_size=1, max_size=50).map(
        lambda each: of_lengths(np.array(each))
    ),
)


@given(of=DISTRIBUTIONS, tokens=st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_survival_is_the_share_of_longer_rows(of: LengthDistribution, tokens: list[int]) -> None:
    points = np.sort(np.array(tokens))
    share = of.survival(points)
    assert share == pytest.approx([float((of.lengths > t).mean()) for t in points])
    assert (np.diff(share) <= 0).all()
    assert of.survival(np.array([0, of.longest])).tolist() == [1.0, 0.0]
    # The area under the curve is the mean.
    if of.longest <= 2000:
        assert of.survival(np.arange(of.longest)).sum() == pytest.approx(of.mean)


@given(of=DISTRIBUTIONS, quantiles=st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_quantiles_and_survival_are_inverse(of: LengthDistribution, quantiles: list[float]) -> None:
    points = np.sort(np.array(quantiles))
    found = of.at(points)
    assert found.dtype == np.int64
    assert (np.diff(found) >= 0).all()
    # No more than 1 - q are longer, and at least 1 - q are as long or longer.
    assert (of.survival(found) <= 1 - points + 1e-9).all()
    assert (of.survival(found - 1) >= 1 - points - 1e-9).all()


@given(of=DISTRIBUTIONS, count=st.integers(1, 500))
def test_a_spread_stands_for_the_distribution(of: LengthDistribution, count: int) -> None:
    found = of.spread(count)
    assert np.array_equal(np.sort(of.spread(len(of.lengths))), of.lengths)
    assert np.array_equal(np.sort(found), np.sort(of.at((np.arange(count) + 0.5) / count)))
    assert set(found) <= set(of.lengths)
    # A point of either stands for at most so much of the rows.
    step = 1.0 / count + 1.0 / len(of.lengths) + 1e-9
    points = np.unique(found)
    assert np.abs(of_lengths(found).survival(points) - of.survival(points)).max() <= step


def test_a_spread_mixes_long_and_short() -> None:
    found = lognormal(3000, 0.9, 20000).spread(1000)
    means = [part.mean() for part in np.split(found, 10)]
    assert max(means) < 1.2 * min(means)


@given(of=DISTRIBUTIONS, tokens=st.integers(1, 10**6))
def test_a_cap_cuts_and_keeps_the_rest(of: LengthDistribution, tokens: int) -> None:
    cut = of.cap(tokens)
    assert cut.longest == min(tokens, of.longest)
    assert cut.mean <= of.mean
    below = np.arange(min(tokens, 50))
    assert cut.survival(below) == pytest.approx(of.survival(below))


@given(median=st.floats(10, 1e4), sigma=st.floats(0.05, 1.2))
def test_a_lognormal_has_its_median_and_mean(median: float, sigma: float) -> None:
    of = lognormal(median, sigma, 10**9)
    assert float(np.median(of.lengths)) == pytest.approx(median, rel=0.01, abs=1)
    assume(sigma < 0.9)  # beyond, 1,024 points miss much of the tail
    assert of.mean == pytest.approx(median * math.exp(sigma**2 / 2), rel=0.02, abs=1)


@pytest.mark.parametrize("make", [
    lambda: lognormal(0.5, 1, 10),
    lambda: lognormal(10, -1, 10),
    lambda: lognormal(10, 1, 0),
    lambda: lognormal(math.nan, 1, 10),
    lambda: lognormal(10, math.nan, 10),
    lambda: of_lengths(np.zeros(0, np.int64)),
    lambda: of_lengths(np.array([0])),
    lambda: of_lengths(np.array([5, -1])),
])  # fmt: skip
def test_impossible_ones_are_refused(make: Callable[[], LengthDistribution]) -> None:
    with pytest.raises(PlanError, match=r"lengths: expected .* Fix: "):
        make()
