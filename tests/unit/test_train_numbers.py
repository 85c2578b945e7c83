"""What the train kernel makes of numbers: foreign tokens, masked rows, the constant, the behaviour,
the mismatch.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dataflow.batch import Batch, Ragged
from dataflow.loss import Loss, Now, Terms, loss_function
from dataflow.schema import Completion, Logprobs, Preference, TruncatedRollout
from operators import losses
from tests.kit.models import save_tiny
from tests.kit.rows import random_rows
from tests.kit.training import PG, assignment, distance, opened, term, weights_of, with_advantage


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("numbers") / "qwen2", layers=1)


def with_mask(rows: Batch, mask: np.ndarray) -> Batch:
    offsets = rows.ragged("completion_ids").offsets
    made = Batch.make(
        rows.keys, {"completion_mask": Ragged(mask.astype(np.uint8), offsets)}, Completion
    )
    return rows.with_columns({"completion_mask": made.array("completion_mask")})


def partly_masked() -> tuple[Batch, int]:
    """Six rows, of which the first and the fifth have no trained token; and how many have some."""
    rows = random_rows(3, 2)
    mask, segments = (
        np.ones(len(rows.ragged("completion_ids").values)),
        rows.ragged("completion_ids").segments(),
    )
    mask[np.isin(segments, [0, 4])] = 0
    return with_mask(rows, mask), 4


def test_what_a_users_loss_makes_of_foreign_tokens_reaches_no_weight(base: str) -> None:
    def careless(now: Now) -> Terms:
        assert now.logprobs is not None
        far = now.logprobs * torch.where(now.mask > 0, 1.0, -1e4)
        return Terms(far.exp())  # infinite where the mask is 0, and so is its slope

    def careful(now: Now) -> Terms:
        assert now.logprobs is not None
        return Terms((now.logprobs * now.mask).exp())

    rows = random_rows(3, 3)
    assert (rows.ragged("completion_mask").values == 0).any()
    found = []
    for fn in (careless, careful):
        kernel = opened(base, Loss((term(loss_function(fn)),)), lr=1e-2)
        kernel.step(assignment(rows))
        found.append(weights_of(kernel))
    assert distance(*found) < 1e-6


@pytest.mark.parametrize("aggregate", ["sequence_mean", "sequence_sum"])
def test_masked_rows_count_where_that_was_asked_for(base: str, aggregate: str) -> None:
    rows, live = partly_masked()
    means = [
        opened(base, PG, aggregate=aggregate, masked_rows=counted).step(with_advantage(rows))[
            "loss/policy_gradient_loss"
        ]
        for counted in ("skip", "count")
    ]
    assert means[1] == pytest.approx(means[0] * live / len(rows), rel=1e-5)
    pairs = Batch.make(rows.keys, {"sign": np.array([1, -1] * 3, np.int8)}, Preference)
    reference = with_advantage(rows).inputs["policy_gradient_loss.advantage"]
    reference = Batch.make(rows.keys, {"logprobs": reference.ragged("advantage")}, Logprobs)
    dpo = Loss((term(losses.DPO, beta=0.1),))
    given = assignment(rows, dpo_loss__pairs=pairs, dpo_loss__reference=reference)
    assert opened(base, dpo, masked_rows="count").step(given)["optim/updates"] == 1.0


def test_the_constant_divides_by_a_full_update_whatever_is_left(base: str) -> None:
    rows, _ = partly_masked()
    params = {"aggregate": "constant", "max_tokens": 6, "step_rows": 8}
    whole = (
        opened(base, PG, aggregate="sequence_sum").step(with_advantage(rows))[
            "loss/policy_gradient_loss"
        ]
        * 4
    )
    found = opened(base, PG, **params).step(with_advantage(rows))["loss/policy_gradient_loss"]
    assert found == pytest.approx(whole / (8 * 6), rel=1e-5)
    # Two updates of one Step: each divides by half of a full Step, and the mean over both is shown.
    halves = opened(base, PG, minibatches=2, lr=1e-30, **params).step(with_advantage(rows))
    assert halves["loss/policy_gradient_loss"] == pytest.approx(whole / (8 * 6), rel=1e-4)


def test_the_mismatch_is_that_of_equal_temperatures_or_none(base: str) -> None:
    rows = random_rows(2, 2)
    supervised = Loss((term(losses.SUPERVISED),))
    same = opened(base, supervised, temperature=0.3, sampler_temperature=0.3).step(assignment(rows))
    other = opened(base, supervised, temperature=1.0, sampler_temperature=0.3).step(
        assignment(rows)
    )
    assert "policy/mismatch_kl" in same
    assert "policy/mismatch_kl" not in other


def test_a_loss_is_told_what_was_drawn_and_what_the_policy_said(base: str) -> None:
    seen: list[Now] = []

    def look(now: Now) -> Terms:
        seen.append(now)
        assert now.logprobs is not None
        return Terms(now.logprobs)

    rows = random_rows(2, 2)
    mass = rows.ragged("completion_ids").like(
        np.full(len(rows.ragged("completion_ids").values), -0.25, np.float32)
    )
    cut = Batch.make(
        rows.keys, {n: rows.array(n) for n in rows.names} | {"sampler_mass": mass}, TruncatedRollout
    )
    kernel = opened(base, Loss((term(loss_function(look)),)))
    kernel.step(assignment(rows))
    kernel.step(assignment(cut, 2))
    whole, part = seen
    assert whole.behaviour is whole.sampler_logprobs
    assert whole.sampler_mass is None
    assert part.sampler_logprobs is not None
    assert part.behaviour is not None
    torch.testing.assert_close(part.behaviour, part.sampler_logprobs + 0.25)
    assert (
        Now(
            mask=part.mask,
            row=part.row,
            group=part.group,
            row_group=part.row_group,
            rows=1,
            groups=1,
            step=1,
        ).behaviour
        is None
    )
