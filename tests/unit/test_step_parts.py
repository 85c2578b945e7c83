"""A train kernel that is given a Step part by part: its update, what it refuses, and what stays of
parts that come to nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.errors import KernelError
from dataflow.kernel import Assignment
from dataflow.kernel_abilities import PartTrainer
from dataflow.loss import Loss, Now, Terms, loss_function
from dataflow.training_parts import count_gradient_sums, why_not_in_parts
from operators import losses
from operators.kernels.torch import optimizer
from operators.kernels.torch.train import TorchTrain
from operators.optimizers import AdamW
from tests.kit.kernels import FakeSession
from tests.kit.rows import random_rows, with_tokens
from tests.kit.step_parts import cut_step, make_step, take_groups, train_in_parts
from tests.kit.training import (
    CLIPPED,
    SHOWN,
    SUPERVISED,
    assert_metrics_alike,
    assignment,
    distance,
    loss_of,
    opened,
    weights_of,
)

GRPO = loss_of(losses.CLIPPED_POLICY, label="loss", **CLIPPED) + 0.1 * loss_of(losses.ENTROPY)
CUT = [1, 0, 2, 0, 2]


def make_grpo_step(step: int) -> Assignment:
    return make_step("CLIPPED_POLICY", random_rows(5, 3, seed=step), step)


def open_grpo(base: str, **params: Any) -> TorchTrain:
    params = {"tokens": 40, "optimizer": AdamW(eps=1e-3)} | params
    return opened(base, GRPO, **params)


def train_two_steps(kernel: TorchTrain) -> dict[str, torch.Tensor]:
    for step in (1, 2):
        train_in_parts(kernel, cut_step(make_grpo_step(step), CUT))
    return weights_of(kernel)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"aggregate": "sequence_mean", "clip_norm": 0.05},
        {"recompute": "layers", "offload": "optimizer"},
    ],
    ids=str,
)
def test_the_update_at_the_end_is_that_of_the_step(
    base: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU: state that is offloaded is copied, and its memory given back.
    monkeypatch.setattr(optimizer, "has_own_memory", lambda device: True)
    one, many = open_grpo(base, **params), open_grpo(base, **params)
    assert isinstance(many, PartTrainer)
    for step in (1, 2):
        whole = make_grpo_step(step)
        wanted = dict(one.step(whole))
        found = train_in_parts(many, cut_step(whole, CUT))
        assert_metrics_alike(found, wanted, 1e-4)
    assert found["optim/updates"] == 1.0
    assert distance(weights_of(one), weights_of(many)) <= 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layout_that_changes_no_bit_changes_none_of_parts(
    base: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train_two_steps(open_grpo(base, dtype=dtype))
    monkeypatch.setattr(optimizer, "has_own_memory", lambda device: True)
    fitted = open_grpo(base, dtype=dtype, recompute="layers", offload="optimizer")
    fitted = train_two_steps(fitted)
    assert distance(plain, fitted) == 0.0


def _begin_again(kernel: TorchTrain) -> None:
    kernel.forget_parts()


def _fail(kernel: TorchTrain) -> None:
    with pytest.raises(KernelError, match="found one of step 7"):
        kernel.train_part(make_grpo_step(7))


def _sleep(kernel: TorchTrain) -> None:
    kernel.sleep()
    kernel.wake()


@pytest.mark.parametrize("undo", [_begin_again, _fail])
def test_a_step_that_begins_again_has_the_bits_of_one_that_did_not(
    base: str, undo: Callable[[TorchTrain], None]
) -> None:
    plain = train_two_steps(open_grpo(base))
    kernel = open_grpo(base)
    train_in_parts(kernel, cut_step(make_grpo_step(1), CUT))
    first, second, third = cut_step(make_grpo_step(2), CUT)
    kernel.train_part(second)
    kernel.train_part(first)
    undo(kernel)
    train_in_parts(kernel, [first, second, third])
    assert distance(plain, weights_of(kernel)) == 0.0


def test_sums_outlive_a_sleep_and_no_weight_has_a_gradient_meanwhile(base: str) -> None:
    plain = train_two_steps(open_grpo(base))
    kernel = open_grpo(base)
    train_in_parts(kernel, cut_step(make_grpo_step(1), CUT))
    for part in cut_step(make_grpo_step(2), CUT):
        kernel.train_part(part)
        assert all(weight.grad is None for weight in kernel._module.parameters())
        _sleep(kernel)
    kernel.finish_parts(2)
    assert distance(plain, weights_of(kernel)) == 0.0


def test_another_order_of_parts_is_another_sum(base: str) -> None:
    """So that the tests of equal bits can fail."""
    plain, kernel = train_two_steps(open_grpo(base)), open_grpo(base)
    for step in (1, 2):
        train_in_parts(kernel, cut_step(make_grpo_step(step), CUT)[::-1])
    assert 0.0 < distance(plain, weights_of(kernel)) < 1e-5


def test_a_checkpoint_after_parts_goes_on(base: str, tmp_path: Path) -> None:
    plain, kernel = train_two_steps(open_grpo(base)), open_grpo(base)
    train_in_parts(kernel, cut_step(make_grpo_step(1), CUT))
    kernel.save(tmp_path / "saved")
    resumed = open_grpo(base)
    resumed.train_part(make_grpo_step(5))
    resumed.restore(tmp_path / "saved")
    train_in_parts(resumed, cut_step(make_grpo_step(2), CUT))
    assert distance(plain, weights_of(resumed)) == 0.0


def test_steps_before_the_first_and_steps_without_a_trained_token_change_nothing(base: str) -> None:
    kernel = open_grpo(base, start=3)
    before = weights_of(kernel)
    early = train_in_parts(kernel, cut_step(make_grpo_step(2), CUT))
    assert early == dict(open_grpo(base, start=3).step(make_grpo_step(2)))
    rows = random_rows(5, 3)
    silence = np.zeros(len(rows.ragged("completion_ids").values), dtype=np.uint8)
    silent = make_step("CLIPPED_POLICY", with_tokens(rows, completion_mask=silence), 4)
    metrics = train_in_parts(kernel, cut_step(silent, CUT))
    assert metrics == dict(open_grpo(base, start=3).step(silent))
    assert metrics["optim/skipped"] == 1.0
    assert distance(before, weights_of(kernel)) == 0.0


def test_what_is_no_part_of_whole_groups_is_refused(base: str) -> None:
    kernel, whole = open_grpo(base), make_grpo_step(1)
    kernel.train_part(take_groups(whole, [10, 12]))
    with pytest.raises(KernelError, match=r"step 1: .*found position 12 in two of them. Fix: "):
        kernel.train_part(take_groups(whole, [11, 12]))
    kernel.train_part(take_groups(whole, [10]))
    with pytest.raises(KernelError, match=r"expected a part of step 1, found one of step 2"):
        kernel.finish_parts(2)


def test_a_row_of_a_part_that_is_on_no_rank_is_missed(base: str) -> None:
    kernel, part = open_grpo(base), take_groups(make_grpo_step(1), [10, 12])
    count = len(part.keys)
    kernel.train_part(replace(part, mine=np.arange(count), total=count + 1))
    expected = f"step 1: expected {count + 1} rows of rows in all parts .*found {count}. Fix: "
    with pytest.raises(KernelError, match=expected):
        kernel.finish_parts(1)


def _steep(now: Now) -> Terms:
    """Its value is 0 and its slope infinite."""
    assert now.logprobs is not None
    return Terms((now.logprobs - now.logprobs.detach()).clamp_min(0.0).sqrt())


def test_a_gradient_that_is_no_number_reaches_no_weight(base: str) -> None:
    kernel = opened(base, loss_of(loss_function(_steep)))
    before, whole = weights_of(kernel), assignment(random_rows(5, 3))
    for part in cut_step(whole, CUT):
        kernel.train_part(part)
    with pytest.raises(KernelError, match="expected a gradient norm that is finite, found nan"):
        kernel.finish_parts(1)
    assert distance(before, weights_of(kernel)) == 0.0
    assert all(weight.grad is None for weight in kernel._module.parameters())


def test_ranks_with_whole_weights_compute_a_part_without_the_others(base: str) -> None:
    """A collective of this group would raise."""
    session = FakeSession(5, "train_policy", rank=1, world=3, group=object())
    kernel = open_grpo(base, session=session)
    for part in cut_step(make_grpo_step(1), CUT):
        kernel.train_part(part)
    with pytest.raises(AttributeError, match="allgather"):
        kernel.finish_parts(1)


# --- what cannot be trained part by part ----------------------------------------------------------

MIXED = GRPO + 0.5 * loss_of(losses.DPO, beta=0.1)


@pytest.mark.parametrize(
    ("loss", "params", "reason"),
    [
        (GRPO, {}, ""),
        (GRPO, {"epochs": 1, "minibatches": 1, "optimizer": AdamW()}, ""),
        (GRPO, {"aggregate": "constant"}, ""),
        (GRPO + 0.3 * SHOWN, {"aggregate": "sequence_sum"}, ""),
        (GRPO, {"epochs": 2}, "epochs=2, and .* Fix: epochs=1"),
        (GRPO, {"minibatches": 4}, "minibatches=4, and .* Fix: minibatches=1"),
        (MIXED, {}, "loss is divided by the Step's tokens, and dpo_loss .* by its groups. Fix: "),
        (
            loss_of(losses.VALUE) + loss_of(losses.ROW_REGRESSION),
            {},
            "value_loss .* tokens, and regression_loss .* rows. Fix: an aggregate",
        ),
        (
            loss_of(losses.VALUE) + loss_of(losses.ROW_REGRESSION),
            {"aggregate": "sequence_mean"},
            "",
        ),
    ],
)
def test_a_node_says_why_it_needs_all_rows_at_once(
    loss: Loss, params: dict[str, Any], reason: str
) -> None:
    found = why_not_in_parts(loss, params)
    assert bool(found) == bool(reason)
    assert re.match(reason, found)


def test_each_set_of_rows_has_one_sum_of_gradients() -> None:
    assert count_gradient_sums(GRPO) == 1
    assert count_gradient_sums(GRPO + SHOWN) == 2
    assert count_gradient_sums(SHOWN) == count_gradient_sums(SUPERVISED) == 1


@pytest.mark.parametrize("params", [{"epochs": 2}, {"minibatches": 2}])
def test_a_kernel_refuses_parts_of_what_needs_all_rows(base: str, params: dict[str, Any]) -> None:
    kernel = open_grpo(base, **params)
    with pytest.raises(KernelError, match="expected a node that can be trained part by part, foun"):
        kernel.train_part(make_grpo_step(1))


def test_a_step_at_once_drops_the_parts_before_it(base: str) -> None:
    one, other = open_grpo(base), open_grpo(base)
    whole = make_grpo_step(1)
    one.step(whole)
    other.train_part(take_groups(whole, [10]))
    other.step(whole)
    assert distance(weights_of(one), weights_of(other)) == 0.0
