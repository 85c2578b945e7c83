"""What a fit leaves over at measured sizes corrects what it says of others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan.cost.fit_errors import measured_over_fitted
from engine.plan.cost.profile import ProfileCell

SMALL = ProfileCell(rows=8, prompt=32, answer=16, seconds=0.1, fitted=0.1)
LARGE = ProfileCell(rows=128, prompt=512, answer=64, seconds=1.2, fitted=1.0)


def off(rows: float, prompt: float, answer: float) -> float:
    return measured_over_fitted([SMALL, LARGE], rows, prompt, answer)


def test_at_a_measured_size_what_was_measured_counts() -> None:
    assert off(8, 32, 16) == pytest.approx(1.0, abs=2e-3)
    assert off(128, 512, 64) == pytest.approx(1.2, abs=2e-3)


def test_between_two_sizes_it_lies_between_and_the_nearer_counts_more() -> None:
    near, far = off(100, 400, 60), off(10, 40, 20)
    assert 1.0 < far < off(32, 128, 32) < near < 1.2


def test_far_away_it_is_the_mean() -> None:
    assert off(1e9, 1e9, 1e9) == pytest.approx(1.2**0.5, rel=0.02)


def test_without_measured_sizes_the_fit_stands() -> None:
    too_large = replace(LARGE, seconds=None)
    assert measured_over_fitted([], 8, 32, 16) == 1.0
    assert measured_over_fitted([too_large, replace(SMALL, fitted=None)], 8, 32, 16) == 1.0


@given(
    st.lists(st.tuples(*[st.integers(1, 10**6)] * 3, st.floats(0.1, 10)), min_size=1, max_size=9),
    st.tuples(*[st.floats(0, 1e9)] * 3),
)
def test_it_is_never_beyond_what_was_left_over(
    cells: list[tuple[int, int, int, float]], size: tuple[float, float, float]
) -> None:
    made = [
        ProfileCell(rows=r, prompt=p, answer=a, seconds=ratio, fitted=1.0)
        for r, p, a, ratio in cells
    ]
    found = measured_over_fitted(made, *size)
    ratios = [ratio for *_, ratio in cells]
    assert min(ratios) * (1 - 1e-9) <= found <= max(ratios) * (1 + 1e-9)
