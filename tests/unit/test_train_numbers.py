"""The train kernel's numbers: foreign tokens, masked rows, constant, behaviour, mismatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from dataflow.loss import Now, Terms, loss_function
from dataflow.schema import Logprobs, Preference, TruncatedRollout
from operators import losses
from tests.kit.rows import random_rows, with_tokens
from tests.kit.training import (
    PG,
    assignment,
    distance,
    loss_of,
    opened,
    weights_of,
    with_advantage,
)


def partly_masked() -> tuple[Batch, int]:
    """Six rows, of which the first and the fifth have no trained token; and how many have some."""
    rows = random_rows(3, 2)
    segments = rows.ragged("completion_ids").segments()
    return with_tokens(rows, completion_mask=(~np.isin(segments, [0, 4])).astype(np.uint8)), 4


def policy_loss(base: str, rows: Batch, **params: Any) -> float:
    """Of one Step."""
    return opened(base, PG, **params).step(with_advantage(rows))["loss/policy_gradient_loss"]


def test_what_a_users_loss_makes_of_foreign_tokens_reaches_no_weight(base: str) -> None:
    def careless(now: Now) -> Terms:
        far = now.logprobs * torch.where(now.mask > 0, 1.0, -1e4)
        return Terms(far.exp())  # infinite where the mask is 0, and so is its slope

    def careful(now: Now) -> Terms:
        return Terms((now.logprobs * now.mask).exp())

    rows = random_rows(3, 3)
    assert (rows.ragged("completion_mask").values == 0).any()
    kernels = [opened(base, loss_of(loss_function(fn)), lr=1e-2) for fn in (careless, careful)]
    for kernel in kernels:
        kernel.step(assignment(rows))
    assert distance(*map(weights_of, kernels)) < 1e-6


@pytest.mark.parametrize("aggregate", ["sequence_mean", "sequence_sum"])
def test_masked_rows_count_where_that_was_asked_for(base: str, aggregate: str) -> None:
    rows, live = partly_masked()
    skipped, counted = (
        policy_loss(base, rows, aggregate=aggregate, masked_rows=how) for how in ("skip", "count")
    )
    assert counted == pytest.approx(skipped * live / len(rows), rel=1e-5)
    pairs = Batch.make(rows.keys, {"sign": np.array([1, -1] * 3, np.int8)}, Preference)
    reference = with_advantage(rows).inputs["policy_gradient_loss.advantage"]
    reference = Batch.make(rows.keys, {"logprobs": reference.ragged("advantage")}, Logprobs)
    dpo = loss_of(losses.DPO, beta=0.1)
    given = assignment(rows, dpo_loss__pairs=pairs, dpo_loss__reference=reference)
    assert opened(base, dpo, masked_rows="count").step(given)["optim/updates"] == 1.0


def test_the_constant_divides_by_a_full_update_whatever_is_left(base: str) -> None:
    rows, _ = partly_masked()
    params = {"aggregate": "constant", "max_tokens": 6, "step_rows": 8}
    mean = policy_loss(base, rows, aggregate="sequence_sum") * 4 / (8 * 6)
    assert policy_loss(base, rows, **params) == pytest.approx(mean, rel=1e-5)
    # Two updates of one Step: each divides by half of a full Step, and the mean over both is shown.
    halves = policy_loss(base, rows, minibatches=2, lr=1e-30, **params)
    assert halves == pytest.approx(mean, rel=1e-4)


def test_a_loss_is_told_what_was_drawn_and_what_the_policy_said(base: str) -> None:
    seen: list[Now] = []

    def look(now: Now) -> Terms:
        seen.append(now)
        return Terms(now.logprobs)

    rows = random_rows(2, 2)
    ids = rows.ragged("completion_ids")
    mass = {"sampler_mass": ids.like(np.full(len(ids.values), -0.25, np.float32))}
    cut = Batch.make(rows.keys, {n: rows.array(n) for n in rows.names} | mass, TruncatedRollout)
    kernel = opened(base, loss_of(loss_function(look)))
    kernel.step(assignment(rows))
    kernel.step(assignment(cut, 2))
    whole, part = seen
    assert whole.behaviour is whole.sampler_logprobs
    assert whole.sampler_mass is None
    torch.testing.assert_close(part.behaviour, part.sampler_logprobs + 0.25)
    assert dataclasses.replace(part, sampler_logprobs=None, sampler_mass=None).behaviour is None


def test_the_sampled_entropy_is_that_of_the_recorded_log_probs(base: str) -> None:
    rows, live = partly_masked()
    assert live < len(rows)
    counts = rows.ragged("completion_mask").values > 0
    recorded = rows.ragged("sampler_logprobs").values.astype(np.float64)
    metrics = opened(base, PG, epochs=2, minibatches=2).step(with_advantage(rows))
    assert metrics["policy/sampled_entropy"] == pytest.approx(-recorded[counts].mean(), rel=1e-5)
    foreign = opened(base, PG, own_samples=False).step(with_advantage(rows))
    assert "policy/sampled_entropy" not in foreign
    counts &= rows.keys.sample[rows.ragged("completion_ids").segments()] == 1
    second = opened(base, PG, own_samples=(False, True)).step(with_advantage(rows))
    assert second["policy/sampled_entropy"] == pytest.approx(-recorded[counts].mean(), rel=1e-5)
