"""Balance: every item in one part, parts of nearly equal weight, deterministically."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.coordinator import balance
from engine.coordinator.balance import (
    MOST_DIFFERENCED,
    split_evenly,
    split_longest_first,
    sum_by_part,
)
from tests.kit.turns import example_count

WEIGHTS = st.lists(st.integers(0, 2000), max_size=60)


def heaviest(items: np.ndarray, part: np.ndarray, parts: int) -> int:
    """The weight of the heaviest part."""
    return int(sum_by_part(items, part, parts).max())


@settings(max_examples=example_count(120))
@given(weights=WEIGHTS, parts=st.integers(1, 9), equal_counts=st.booleans())
def test_every_item_is_in_one_part_no_heavier_than_longest_first(
    weights: list[int], parts: int, equal_counts: bool
) -> None:
    items = np.array(weights, dtype=np.int64)
    part = split_evenly(items, parts, equal_counts=equal_counts)
    assert part.shape == items.shape
    assert ((part >= 0) & (part < parts)).all()
    greedy = split_longest_first(items, parts, equal_counts=equal_counts)
    assert heaviest(items, part, parts) <= heaviest(items, greedy, parts)
    assert np.array_equal(part, split_evenly(items, parts, equal_counts=equal_counts))
    if equal_counts:
        counts = np.bincount(part, minlength=parts)
        assert counts.max() - counts.min() <= 1


@settings(max_examples=example_count(60))
@given(weights=st.lists(st.integers(0, 50), min_size=1, max_size=7), parts=st.integers(2, 3))
def test_few_items_are_split_within_a_third_of_the_best(weights: list[int], parts: int) -> None:
    items = np.array(weights)
    every = product(range(parts), repeat=len(items))
    best = min(heaviest(items, np.array(part), parts) for part in every)
    assert heaviest(items, split_evenly(items, parts), parts) <= 4 / 3 * best


# Karmarkar and Karp's example: longest first gives 17, differencing 16.
KNOWN = np.array([8, 7, 6, 5, 4])


@pytest.mark.parametrize(("most", "weight"), [(MOST_DIFFERENCED, 16), (10, 16), (9, 17)])
def test_differencing_beats_longest_first_unless_items_times_parts_are_too_many(
    monkeypatch: pytest.MonkeyPatch, most: int, weight: int
) -> None:
    monkeypatch.setattr(balance, "MOST_DIFFERENCED", most)
    assert heaviest(KNOWN, split_longest_first(KNOWN, 2), 2) == 17
    assert heaviest(KNOWN, split_evenly(KNOWN, 2), 2) == weight


@pytest.mark.parametrize("parts", [MOST_DIFFERENCED // 4096 + 1, 4096])
def test_a_cohort_for_thousands_of_parts_is_split_longest_first(
    monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    monkeypatch.setattr(balance, "_merge_parts", None)  # which must not be called
    items = np.random.default_rng(2).lognormal(6, 1, 4096).astype(np.int64)
    part = split_evenly(items, parts)
    assert np.array_equal(part, split_longest_first(items, parts))
    assert heaviest(items, part, parts) <= 1.1 * max(items.max(), items.sum() / parts)


def test_long_tailed_items_are_even_to_a_percent_with_equal_counts_to_a_fifth() -> None:
    items = np.random.default_rng(0).lognormal(6, 1, 512).astype(np.int64) + 1
    for parts, equal_counts in product((2, 8, 16), (False, True)):
        found = sum_by_part(items, split_evenly(items, parts, equal_counts=equal_counts), parts)
        assert found.max() <= (1.2 if equal_counts else 1.01) * found.mean()


def test_many_items_in_many_parts() -> None:
    items = np.random.default_rng(1).integers(1, 30_000, 10_000)
    found = sum_by_part(items, split_evenly(items, 64), 64)
    assert found.max() - found.min() <= 10


@pytest.mark.parametrize(("weights", "parts"), [([1, -2], 2), ([1], 0)])
def test_no_part_and_negative_weights_are_refused(weights: list[int], parts: int) -> None:
    with pytest.raises(ValueError, match="expected at least one part and weights >= 0"):
        split_evenly(weights, parts)
