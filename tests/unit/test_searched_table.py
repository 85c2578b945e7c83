"""The layout table that a search fills: its points, what has room, and which layouts stay."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan.cost.distribution import assume_mean
from engine.plan.costs import plan_costs
from engine.plan.layout_table import RunLayout
from engine.plan.searched_table import LEAST_GAIN, find_room, list_points, make_table
from tests.kit.graphs import grpo_graph
from tests.kit.plans import planned
from tests.kit.turns import example_count

ONE, TWO, THREE = (RunLayout(text=text) for text in ("one", "two", "three"))


@pytest.mark.usefixtures("tiny")
def test_points_are_powers_of_two_up_to_the_longest_rows() -> None:
    plan = planned(grpo_graph(batch=10, n=8, max_tokens=400))
    live = list_points(plan)
    assert live is not None
    assert list(live.lengths) == [1024, 2048, 4096, 8192, 16384, 32000]
    for tokens, lengths in live.lengths.items():
        assert lengths.answers is not None
        assert lengths.answers.mean == pytest.approx(tokens / 80, rel=0.05)
        assert lengths.answers.longest <= 400
    assert 1024 < live.begins < 32000
    assert find_room(plan, plan_costs(plan)) == math.inf, "no cache of a fixed size"


@pytest.mark.parametrize("mean", [4, 100, 900, 999])
def test_an_assumed_mean_is_the_mean(mean: float) -> None:
    answers = assume_mean(mean, 1000)
    assert answers.mean == pytest.approx(mean, rel=0.02)
    assert answers.longest <= 1000


def test_what_is_worth_little_everywhere_is_left_out() -> None:
    grid = {1024: (1.0, 1.5, 1.01), 2048: (2.0, 1.5, 1.49), 4096: (9.0, 2.0, 1.98)}
    table = make_table((ONE, TWO, THREE), grid, switch_seconds=3.0, begins=3000.0)
    assert [layout.text for layout in table.layouts] == ["three"]
    assert (table.switch_seconds, table.first) == (3.0, 0)


def test_a_layout_without_room_is_left_before() -> None:
    narrow = RunLayout(text="narrow", most=3000.0)
    table = make_table((narrow, TWO), {1024: (1.0, 2.0), 2048: (1.0, 2.0), 4096: (1.0, 2.0)})
    assert [bucket.best for bucket in table.buckets] == [0, 0, 1]
    assert table.fits(0, 3000.0)
    assert not table.fits(0, 3001.0)
    assert table.fits(1, 1e9)


def test_where_no_layout_has_room_seconds_decide() -> None:
    narrow = RunLayout(text="narrow", most=1500.0)
    wide = RunLayout(text="wide", most=3000.0)
    table = make_table((narrow, wide), {1024: (1.0, 2.0), 2048: (1.0, 2.0), 4096: (3.0, 2.0)})
    assert [bucket.best for bucket in table.buckets] == [0, 1, 1]
    assert [layout.most for layout in table.layouts] == [1500.0, math.inf]


cells = st.floats(0.1, 10.0) | st.just(math.inf)


@settings(max_examples=example_count(200))
@given(st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=6))
def test_few_layouts_lose_little(rows: list[tuple[float, float, float]]) -> None:
    grid = {2 ** (10 + number): row for number, row in enumerate(rows)}
    table = make_table((ONE, TWO, THREE), grid)
    for bucket, row in zip(table.buckets, rows, strict=True):
        assert min(bucket.seconds) <= min(row) * (1.0 + LEAST_GAIN)
    for before, bucket in pairwise(table.buckets):
        alike = bucket.seconds[before.best] <= min(bucket.seconds) * (1.0 + LEAST_GAIN)
        assert bucket.best == before.best or not alike or math.isinf(min(bucket.seconds))


def test_what_differs_by_little_is_worth_no_switch() -> None:
    grid = {1024: (1.0, 2.0), 2048: (1.02, 1.0), 4096: (1.1, 1.0), 8192: (1.0, 1.02)}
    table = make_table((ONE, TWO), grid)
    assert [bucket.best for bucket in table.buckets] == [0, 0, 1, 1]
