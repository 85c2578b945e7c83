"""The train kernel: what it refuses, by which name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataflow.batch import Batch
from dataflow.errors import DataError, KernelError
from dataflow.loss import Loss, Now, Terms, loss_function
from dataflow.schema import Advantage
from operators import losses
from tests.kit.models import save_tiny
from tests.kit.rows import random_rows, token_column
from tests.kit.training import PG, assignment, distance, opened, term, weights_of


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("train") / "qwen2")


def test_a_row_that_is_not_finite_stops_the_run_by_name(base: str) -> None:
    rows = random_rows(2, 2)
    ids = rows.ragged("completion_ids")
    values = np.ones(len(ids.values), dtype=np.float32)
    last = int(np.flatnonzero(rows.ragged("completion_mask").values)[-1])
    values[last] = np.inf
    values[rows.ragged("completion_mask").values == 0] = np.nan
    bad = Batch.make(rows.keys, {"advantage": ids.like(values)}, Advantage)
    kernel = opened(base, PG)
    before = weights_of(kernel)
    with pytest.raises(
        KernelError,
        match=(
            r"train_policy: step 4: expected a loss that is finite, found .*first row \(11, 1, 0\)"
        ),
    ):
        kernel.step(assignment(rows, 4, policy_gradient_loss__advantage=bad))
    assert distance(before, weights_of(kernel)) == 0.0
    assert all(p.grad is None for p in kernel._module.parameters())


def test_a_column_of_other_rows_is_refused(base: str) -> None:
    rows = random_rows(2, 2)
    other = token_column(random_rows(2, 2, seed=3), "advantage")
    with pytest.raises(
        DataError,
        match=r"policy_gradient_loss\.advantage\.advantage: row \(10, \d, 0\) has \d values",
    ):
        opened(base, PG).step(assignment(rows, policy_gradient_loss__advantage=other))


def test_a_loss_of_the_wrong_length_is_refused(base: str) -> None:
    def averaged(now: Now) -> Terms:
        assert now.logprobs is not None
        return Terms(now.logprobs.mean())

    with pytest.raises(
        KernelError,
        match=(
            r"loss averaged: expected Terms.loss of shape \[\d+\], one number a token, found \[\]"
        ),
    ):
        opened(base, Loss((term(loss_function(averaged)),))).step(assignment(random_rows(2, 2)))


def test_a_loss_without_gradient_is_refused(base: str) -> None:
    function = loss_function(lambda now: Terms(now.logprobs.detach()), name="constant")
    with pytest.raises(
        KernelError, match="expected a loss that depends on what the model says, found a constant"
    ):
        opened(base, Loss((term(function),))).step(assignment(random_rows(2, 2)))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"aggregate": "token-mean"}, "expected aggregate to be one of token_mean"),
        (
            {"aggregate": "constant"},
            "divides by the rows of a Step times max_tokens, found None and None",
        ),
        ({"masked_rows": "all"}, "expected masked_rows to be one of skip, count, found 'all'"),
        ({"optimizer": "sgd"}, "expected optimizer 'adamw'"),
        ({"loss": Loss((term(losses.VALUE, clip=None),))}, "needs a Model with head='scalar'"),
        (
            {"loss": Loss((term(losses.DPO, beta=0.1),)), "aggregate": "sequence_sum"},
            "takes only their mean",
        ),
    ],
)
def test_parameters_that_cannot_be_honoured_are_refused_at_open(
    base: str, params: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"loss": PG} | params
    with pytest.raises(KernelError, match=message):
        opened(base, **given)
