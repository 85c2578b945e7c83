"""The train kernel: what it refuses, by which name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataflow.batch import Batch
from dataflow.errors import DataError, KernelError
from dataflow.loss import Terms, loss_function
from dataflow.schema import Advantage
from operators import losses
from tests.kit.rows import random_rows, token_column
from tests.kit.training import PG, assignment, distance, loss_of, opened, weights_of


def test_a_row_that_is_not_finite_stops_the_run_by_name(base: str) -> None:
    rows = random_rows(2, 2)
    ids, mask = rows.ragged("completion_ids"), rows.ragged("completion_mask").values
    values = np.where(mask == 0, np.nan, 1.0).astype(np.float32)
    values[np.flatnonzero(mask)[-1]] = np.inf
    bad = Batch.make(rows.keys, {"advantage": ids.like(values)}, Advantage)
    kernel = opened(base, PG)
    before = weights_of(kernel)
    told = r"train_policy: step 4: expected a loss that is finite, found .*first row \(11, 1, 0\)"
    with pytest.raises(KernelError, match=told):
        kernel.step(assignment(rows, 4, policy_gradient_loss__advantage=bad))
    assert distance(before, weights_of(kernel)) == 0.0
    assert all(p.grad is None for p in kernel._module.parameters())


def test_a_column_of_other_rows_is_refused(base: str) -> None:
    rows = random_rows(2, 2)
    other = token_column(random_rows(2, 2, seed=3), "advantage")
    told = r"policy_gradient_loss\.advantage\.advantage: row \(10, \d, 0\) has \d values"
    with pytest.raises(DataError, match=told):
        opened(base, PG).step(assignment(rows, policy_gradient_loss__advantage=other))


@pytest.mark.parametrize(("fn", "told"), [
    (
        lambda now: Terms(now.logprobs.mean()),
        r"loss mine: expected Terms.loss of shape \[\d+\], one number a token, found \[\]",
    ),
    (
        lambda now: Terms(now.logprobs.detach()),
        "expected a loss that depends on what the model says, found a constant",
    ),
], ids=["wrong length", "no gradient"])  # fmt: skip
def test_a_loss_that_cannot_be_trained_on_is_refused(base: str, fn: Any, told: str) -> None:
    kernel = opened(base, loss_of(loss_function(fn, name="mine")))
    with pytest.raises(KernelError, match=told):
        kernel.step(assignment(random_rows(2, 2)))


DPO = loss_of(losses.DPO, beta=0.1)


@pytest.mark.parametrize(("params", "message"), [
    ({"aggregate": "token-mean"}, "expected aggregate to be one of token_mean"),
    ({"aggregate": "constant"}, "divides by the rows of a Step times max_tokens, found None"),
    ({"masked_rows": "all"}, "expected masked_rows to be one of skip, count, found 'all'"),
    ({"optimizer": "sgd"}, "expected optimizer 'adamw'"),
    ({"loss": loss_of(losses.VALUE, clip=None)}, "needs a Model with head='scalar'"),
    ({"loss": DPO, "aggregate": "sequence_sum"}, "takes only their mean"),
])  # fmt: skip
def test_parameters_that_cannot_be_honoured_are_refused_at_open(
    base: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(KernelError, match=message):
        opened(base, **{"loss": PG} | params)
