"""Recall of the longest and Kendall's tau against plain loops over pairs and choices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.schema import Rollout
from engine.run.worker.weight_metrics import (
    TAIL,
    find_gain,
    find_recall,
    find_tau,
    weight_metrics,
)
from tests.kit.ragged_lists import ragged
from tests.kit.turns import example_count

FEW = st.integers(0, 4).map(float)
PAIRS = st.lists(st.tuples(FEW, FEW), min_size=2, max_size=7)


def plain_tau(weight: list[float], length: list[float]) -> float | None:
    signs, weight_differs, length_differs = 0.0, 0, 0
    for (w, x), (v, y) in itertools.combinations(zip(weight, length, strict=True), 2):
        signs += np.sign(w - v) * np.sign(x - y)
        weight_differs += w != v
        length_differs += x != y
    if not weight_differs or not length_differs:
        return None
    return signs / math.sqrt(weight_differs * length_differs)


def choices(numbers: list[float], tail: int) -> list[set[int]]:
    """Every set of the `tail` greatest."""
    bound = sorted(numbers, reverse=True)[tail - 1]
    above = {row for row, number in enumerate(numbers) if number > bound}
    equal = [row for row, number in enumerate(numbers) if number == bound]
    return [above | set(some) for some in itertools.combinations(equal, tail - len(above))]


def plain_recall(weight: list[float], length: list[float]) -> float | None:
    if len(set(length)) == 1:
        return None
    tail = max(1, round(TAIL * len(length)))
    shares: list[float] = []
    for heavy in choices(weight, tail):
        shares += [len(heavy & longest) / tail for longest in choices(length, tail)]
    return sum(shares) / len(shares)


@given(PAIRS)
@settings(max_examples=example_count(100))
def test_they_are_those_of_plain_loops(rows: list[tuple[float, float]]) -> None:
    weight, length = map(list, zip(*rows, strict=True))
    tau = find_tau(np.array(weight), np.array(length))
    assert tau == pytest.approx(plain_tau(weight, length))
    recall = find_recall(np.array(weight), np.array(length))
    assert recall == pytest.approx(plain_recall(weight, length))


def test_tau_of_many_rows_is_1_in_the_same_order_and_minus_1_in_the_reverse() -> None:
    numbers = np.random.default_rng(0).normal(size=20_000)
    assert find_tau(numbers, np.exp(numbers)) == 1.0
    assert find_tau(numbers, -numbers) == -1.0
    assert abs(find_tau(numbers, numbers[::-1]) or 0.0) < 0.05
    assert find_recall(numbers, np.exp(numbers)) == 1.0
    assert find_recall(numbers, -numbers) == 0.0


def rows_of(position: list[int], weight: list[float], lengths: list[int]) -> Batch:
    masks = ragged([[1] * length for length in lengths]).like(np.ones(sum(lengths), np.uint8))
    keys = Keys.of(position, range(len(position)))
    rows = Batch.make(keys, {"completion_mask": masks}, Rollout)
    return rows.with_columns({"weight": pa.array(weight, pa.float32())})


def test_lengths_are_means_of_a_prompts_answers() -> None:
    rows = rows_of([0, 0, 1, 1], [1.0, 1.0, 2.0, 2.0], [9, 1, 6, 6])
    measured = {name: (number, count) for name, number, count in weight_metrics(rows)}
    assert measured == {"weight/recall": (1.0, 2.0), "weight/tau": (1.0, 2.0)}


def test_prompts_of_one_position_differ_by_their_weights() -> None:
    rows = rows_of([0, 0, 0, 0], [1.0, 2.0, 1.0, 2.0], [9, 1, 9, 1])
    measured = {name: (number, count) for name, number, count in weight_metrics(rows)}
    assert measured == {"weight/recall": (0.0, 2.0), "weight/tau": (-1.0, 2.0)}


def test_prompts_of_one_weight_are_two() -> None:
    rows = rows_of([0, 1, 1, 2], [1.0, 1.0, 1.0, 2.0], [3, 4, 4, 9])
    measured = {name: (number, count) for name, number, count in weight_metrics(rows)}
    assert measured["weight/recall"] == (1.0, 3.0)
    assert measured["weight/tau"] == (pytest.approx(2 / math.sqrt(3 * 2)), 3.0)


def test_rows_without_weights_or_of_one_length_have_none() -> None:
    rows = rows_of([0, 1], [1.0, 2.0], [3, 3])
    assert list(weight_metrics(rows)) == []
    assert list(weight_metrics(rows.select(["completion_mask"]))) == []
    assert list(weight_metrics(rows.take(np.zeros(0, np.int64)))) == []


def test_the_tail_of_eight_is_two() -> None:
    numbers = np.arange(8.0)
    other = np.array([0, 1, 2, 3, 4, 5, 7, 6.0])
    assert find_recall(numbers, other) == 1.0


def test_gain_is_how_many_times_as_long_the_rows_take_without_weights() -> None:
    lengths = np.array([1, 1, 1, 1, 4])
    assert find_gain(lengths, lengths, 2) == 6 / 4, "the long one begins at pass 2, or at once"
    assert find_gain(-lengths, lengths, 2) == 1.0
    long_first = lengths[::-1]
    assert find_gain(-long_first, long_first, 2) == 4 / 6, "weights that mislead"
    assert find_gain(lengths, lengths, 5) == 1.0, "every row has a slot at once"
    rows = rows_of([0, 1, 2, 3, 4], [0.0, 0.0, 0.0, 0.0, 1.0], lengths.tolist())
    assert ("weight/gain", 1.5, 5.0) in weight_metrics(rows, 2)
    assert "weight/gain" not in {name for name, _, _ in weight_metrics(rows)}


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 6))
@settings(max_examples=example_count(100))
def test_the_longest_first_is_at_most_a_third_above_the_best(
    lengths: list[int], slots: int
) -> None:
    """At most a third longer than any order, and any order at most twice as long (Graham 1969)."""
    rows = np.array(lengths)
    assert 3 / 4 <= find_gain(rows, rows, slots) <= 2
