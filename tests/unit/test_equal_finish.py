"""Unlike Workers end together: loads, and loads with shares of a link, against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan.search.equal_finish import (
    LinkedWorker,
    divide_by_rate,
    divide_units,
    share_link,
)

SECONDS = st.floats(0.01, 100.0)


def last_end(curves: Sequence[Sequence[float]], loads: Sequence[int]) -> float:
    return max(curve[load] for curve, load in zip(curves, loads, strict=True))


@given(units=st.integers(0, 12), chance=st.data())
def test_loads_end_as_early_as_any_division_does(units: int, chance: st.DataObject) -> None:
    """Of two and three Workers, whose seconds grow in any way."""
    steps = st.lists(SECONDS, min_size=units, max_size=units)
    unit_seconds = chance.draw(st.lists(steps, min_size=2, max_size=3))
    curves = [[0.0, *accumulate(each)] for each in unit_seconds]
    loads = divide_units([curve.__getitem__ for curve in curves], units)
    assert sum(loads) == units
    divisions = product(range(units + 1), repeat=len(curves))
    best = min(last_end(curves, each) for each in divisions if sum(each) == units)
    assert last_end(curves, loads) == pytest.approx(best)


@given(rates=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=3))
def test_of_many_rows_all_end_within_one_percent(rates: list[float]) -> None:
    loads = divide_by_rate(rates, 2000)
    ends = [rate * load for rate, load in zip(rates, loads, strict=True)]
    assert sum(loads) == 2000
    assert max(ends) <= 1.01 * min(ends)


def test_a_worker_that_would_be_last_has_nothing() -> None:
    assert divide_by_rate([1.0, 100.0], 5) == (5, 0)
    assert divide_by_rate([3.0], 5) == (5,)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_seconds_that_are_none_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        divide_by_rate([1.0, seconds], 4)


LINKED = st.builds(LinkedWorker, compute=st.floats(0.1, 10.0), spectrum=st.floats(0.1, 10.0))


def best_of_grid(workers: Sequence[LinkedWorker], points: int) -> float:
    """The earliest end of a load of 1 with 1 byte a unit, over a grid of loads and shares."""
    grid = np.linspace(0.0, 1.0, points)
    divisions = np.array(np.meshgrid(*[grid] * (len(workers) - 1))).reshape(len(workers) - 1, -1)
    divisions = divisions[:, divisions.sum(axis=0) <= 1.0]
    divisions = np.vstack([divisions, 1.0 - divisions.sum(axis=0)])
    ends = np.zeros((divisions.shape[1], divisions.shape[1]))
    with np.errstate(divide="ignore", invalid="ignore"):
        for worker, part in zip(workers, divisions, strict=True):
            link = 1.0 / (worker.spectrum * np.maximum(part, 0.0))
            seconds = part[:, None] * (worker.compute + link[None, :])
            ends = np.maximum(ends, np.where(part[:, None] > 0, seconds, 0.0))
    return float(ends.min())


@given(workers=st.lists(LINKED, min_size=2, max_size=3))
def test_loads_and_shares_are_the_best_together(workers: list[LinkedWorker]) -> None:
    """No division of a grid ends sooner, and a fine one not later than by its coarseness."""
    best = share_link(workers, load=1.0, unit_bytes=1.0, bandwidth=1.0)
    assert sum(best.loads) == pytest.approx(1.0)
    assert sum(best.shares) == pytest.approx(1.0)
    for worker, load, share in zip(workers, best.loads, best.shares, strict=True):
        if load:
            end = load * (worker.compute + 1.0 / (worker.spectrum * share))
            assert end == pytest.approx(best.seconds, rel=0.01)
    assert best.seconds <= best_of_grid(workers, 201 if len(workers) == 2 else 17) * (1 + 1e-6)


def test_the_best_of_two_is_that_of_a_fine_grid() -> None:
    workers = [LinkedWorker(compute=1.0), LinkedWorker(compute=3.0, spectrum=0.5)]
    best = share_link(workers, load=1.0, unit_bytes=1.0, bandwidth=1.0)
    assert best.seconds == pytest.approx(best_of_grid(workers, 1001), rel=0.01)


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        share_link([LinkedWorker(compute=0.0)], load=1.0, unit_bytes=1.0, bandwidth=1.0)
