"""Minibatches and denominators: what is decided before a Step's first forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.kernels.torch.minibatches import draw_minibatches
from operators.kernels.torch.reduce import count_weights
from tests.kit.turns import example_count


@settings(max_examples=example_count(40))
@given(
    groups=st.integers(1, 13),
    count=st.integers(1, 5),
    epochs=st.integers(1, 3),
    step=st.integers(1, 3),
)
def test_minibatches_are_whole_groups_in_equal_number(
    groups: int, count: int, epochs: int, step: int
) -> None:
    position = np.repeat(np.arange(groups) * 3, 2)
    how = {"epochs": epochs, "count": count, "seed": 1, "node": "n", "step": step}
    batches = list(draw_minibatches(position, **how))
    for batch, again in zip(batches, draw_minibatches(position, **how), strict=True):
        assert np.array_equal(batch, again)
    for epoch in range(epochs):
        parts = batches[epoch * count : (epoch + 1) * count]
        assert sorted(np.concatenate(parts).tolist()) == list(range(2 * groups))
        sizes = [len(set(position[p])) for p in parts]
        assert max(sizes) - min(sizes) <= 1
        assert all(len(p) == 2 * s for p, s in zip(parts, sizes, strict=True))


def test_minibatches_differ_by_epoch_step_node_and_seed() -> None:
    position = np.arange(64)
    usual = {"epochs": 2, "count": 2, "seed": 1, "node": "n", "step": 1}
    first, _, second, _ = draw_minibatches(position, **usual)
    assert not np.array_equal(first, second)
    for change in ({"seed": 2}, {"node": "m"}, {"step": 2}):
        assert not np.array_equal(next(iter(draw_minibatches(position, **(usual | change)))), first)


def counted(trained: list[int], groups: list[int], chosen: list[int], **how: Any) -> Any:
    return count_weights(np.array(trained), np.array(groups), np.array(chosen), **how)


@pytest.mark.parametrize(("masked", "rows"), [("skip", 2), ("count", 3)])
def test_a_mean_over_rows_counts_those_without_a_trained_token_where_that_was_asked_for(
    masked: str, rows: int
) -> None:
    how = {"aggregate": "sequence_mean", "masked_rows": masked}
    weights = counted([3, 0, 1, 4], [0, 0, 1, 2], [0, 1, 2], **how)
    np.testing.assert_allclose(weights.token * rows, [1 / 3, 0, 1, 0])
    np.testing.assert_allclose(weights.row * rows, [1, 0, 1, 0])
    assert (weights.group, weights.tokens) == (1 / 2, 4)


@pytest.mark.parametrize("aggregate", ["sequence_sum", "token_mean"])
def test_sums_count_rows_without_a_trained_token_too(aggregate: str) -> None:
    how = {"aggregate": aggregate, "masked_rows": "count"}
    weights = counted([3, 0, 1, 0], [0, 0, 1, 2], [0, 1, 2, 3], **how)
    np.testing.assert_allclose(weights.token, [1 / 4, 0, 1 / 4, 0])
    assert weights.group == 1 / 3


@pytest.mark.parametrize(
    ("trained", "chosen"),
    [([3, 2, 1, 4], [0, 1, 2, 3]), ([3, 0, 0, 4], [0, 1, 2, 3]), ([3, 2, 1, 4], [0])],
    ids=["all", "without masked rows", "one"],
)
def test_a_constant_divisor_is_the_same_whichever_rows_are_left(
    trained: list[int], chosen: list[int]
) -> None:
    for masked in ("skip", "count"):
        how = {"aggregate": "constant", "masked_rows": masked, "constant": 40.0}
        weights = counted(trained, [0, 1, 2, 3], chosen, **how)
        assert weights.token[0] == 1 / 40
        assert weights.token.sum() == sum(trained[i] > 0 for i in chosen) / 40
