"""The loss of an order against plain formulas in float64."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataflow.batch import Batch, Keys
from dataflow.errors import GraphError
from dataflow.loss import Now, Tensors
from dataflow.schema import RankTerms, Reward
from dataflow.user import Columns
from operators.rank_formulas import rank, ranks
from tests.kit.plain_rankers import list_mle
from tests.kit.turns import example_count

ROWS = st.lists(st.tuples(st.floats(-30, 30, width=32), st.integers(0, 5)), min_size=1, max_size=12)


def column(numbers: list[float]) -> Columns[Reward]:
    keys = Keys.of(range(len(numbers)))
    return Columns(Batch.make(keys, {"reward": np.array(numbers, np.float32)}, Reward), Reward)


def terms_of(scores: list[float], targets: list[float]) -> Columns[RankTerms]:
    return ranks(column(scores), column(targets))


def plain_loss(scores: list[float], targets: list[float]) -> tuple[float, np.ndarray]:
    """The sum of all terms and its gradient, by torch in float64."""
    leaves = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    total = list_mle(leaves, targets)
    total.backward()
    assert leaves.grad is not None
    return float(total.detach()), leaves.grad.numpy()


@given(ROWS)
@settings(max_examples=example_count(60), deadline=None)
def test_terms_and_slopes_are_those_of_plain_list_mle(rows: list[tuple[float, int]]) -> None:
    scores, targets = map(list, zip(*rows, strict=True))
    total, gradient = plain_loss(scores, targets)
    terms = terms_of(scores, targets)
    assert float(terms["term"].astype(np.float64).sum()) == pytest.approx(total, rel=1e-6, abs=1e-5)
    np.testing.assert_allclose(terms["slope"], gradient, rtol=1e-5, atol=1e-6)


@given(ROWS, st.randoms(use_true_random=False))
@settings(max_examples=example_count(30), deadline=None)
def test_a_list_in_another_order_is_the_same_list(
    rows: list[tuple[float, int]], shuffler: random.Random
) -> None:
    order = list(range(len(rows)))
    shuffler.shuffle(order)
    scores, targets = map(list, zip(*rows, strict=True))
    terms = terms_of(scores, targets)
    moved = terms_of([scores[row] for row in order], [targets[row] for row in order])
    np.testing.assert_allclose(moved["slope"], terms["slope"][order], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(moved["term"], terms["term"][order], rtol=1e-5, atol=1e-6)


def test_without_equal_targets_it_is_the_likelihood_of_the_whole_order() -> None:
    """Xia et al. 2008, equation 8: a product over places of exp(s) over the sum of what is left."""
    scores, targets = [0.5, -1.0, 2.0], [3.0, 1.0, 2.0]
    likelihood, left = 1.0, list(np.exp([0.5, 2.0, -1.0]))
    while left:
        likelihood *= left[0] / sum(left)
        left.pop(0)
    assert terms_of(scores, targets)["term"].sum() == pytest.approx(-np.log(likelihood), rel=1e-6)


def now_of(scores: Tensor, mask: list[float]) -> Now:
    """Rows of one token each."""
    places = torch.arange(len(mask))
    return Now(
        mask=torch.tensor(mask, dtype=scores.dtype),
        row=places,
        group=places,
        row_group=places,
        rows=len(mask),
        groups=len(mask),
        step=1,
        scores=scores,
    )


def tensors_of(terms: Columns[RankTerms]) -> Tensors[RankTerms]:
    return Tensors({name: torch.tensor(terms[name]).double() for name in RankTerms.columns})


def test_the_loss_has_value_and_gradient_of_the_list_at_its_scores() -> None:
    scores, targets = [0.5, -1.0, 2.0, 0.25], [3.0, 1.0, 2.0, 2.0]
    total, gradient = plain_loss(scores, targets)
    leaves = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    terms = rank(now_of(leaves, [1.0] * 4), tensors_of(terms_of(scores, targets))).loss
    terms.sum().backward()
    assert float(terms.detach().sum()) == pytest.approx(total, rel=1e-6)
    assert leaves.grad is not None
    np.testing.assert_allclose(leaves.grad.numpy(), gradient, rtol=1e-6)


def test_a_row_without_a_trained_token_counts_nothing() -> None:
    leaves = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    lists = tensors_of(terms_of([0.0, 0.0], [2.0, 1.0]))
    terms = rank(now_of(leaves, [0.0, 1.0]), lists).loss
    terms.sum().backward()
    assert float(lists["term"][0]) > 0.5, "it would count, were it trained"
    assert terms.tolist() == [0.0, 0.0]
    assert leaves.grad is not None
    assert leaves.grad.tolist() == [0.0, 0.5]


def test_a_model_without_a_scalar_head_is_refused() -> None:
    now = replace(now_of(torch.zeros(1), [1.0]), scores=None)
    with pytest.raises(GraphError, match="rank_loss"):
        rank(now, tensors_of(terms_of([0.0], [0.0])))
