"""Groups that lost rows: each is computed as if it had never had them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dataflow.batch import Batch, Keys
from dataflow.loss_inputs import Now, Tensors
from dataflow.schema import Completion, Reward
from dataflow.user import Columns
from operators import advantage_formulas, loss_formulas, select

KEYS = Keys.of([0, 0, 0, 1, 2, 2], [0, 2, 3, 1, 0, 1])
"""Groups of three, one and two rows, of four each."""
REWARDS = np.array([1.0, 0.0, 0.5, 0.7, 0.25, 0.75], np.float32)


def scored() -> Columns[Reward]:
    return Columns(Batch.make(KEYS, {"reward": REWARDS}, Reward), Reward)


def completed() -> Columns[Completion]:
    masks = [np.ones(2, np.uint8)] * len(KEYS)
    return Columns(Batch.make(KEYS, {"completion_mask": masks}, Completion), Completion)


def advantages(**how: Any) -> list[float]:
    usual: dict[str, Any] = {"baseline": "mean", "scale": "none", "ragged": False, "dialect": "trl"}
    columns = advantage_formulas.group_advantage(completed(), scored(), **usual | how)
    return columns["advantage"].values[::2].tolist()


def test_a_baseline_counts_by_what_is_left() -> None:
    assert advantages() == pytest.approx([0.5, -0.5, 0.0, 0.0, -0.25, 0.25])
    others = advantages(baseline="leave_one_out")
    assert others == pytest.approx([0.75, -0.75, 0.0, 0.0, -0.5, 0.5])


@pytest.mark.parametrize(
    ("dialect", "alone"), [("trl", 0.0), ("verl", 0.7), ("openrlhf", 0.0), ("nemo_rl", 0.0)]
)
def test_a_row_that_is_left_alone_has_what_its_dialect_gives_it(dialect: str, alone: float) -> None:
    assert advantages(dialect=dialect, scale="std")[3] == pytest.approx(alone, rel=1e-5)


def test_whether_ragged_is_stated_changes_nothing() -> None:
    assert advantages(ragged=True, scale="std") == advantages(ragged=False, scale="std")


def test_selections_compare_what_is_left() -> None:
    mixed = select._mixed_groups(scored(), tolerance=0.0)
    assert mixed["keep"].tolist() == [1, 1, 1, 0, 1, 1]
    best = select._best_of(scored(), k=2, above=None)
    assert best["keep"].tolist() == [1, 0, 1, 1, 1, 1]
    pairs = select._pair(scored(), margin=0.0)
    assert pairs["sign"].tolist() == [1, -1, 0, 0, -1, 1]
    assert pairs["keep"].tolist() == [1, 1, 0, 0, 1, 1]


def packed(logprobs: Tensor, groups: list[int]) -> Now:
    """A token a row."""
    row, group = torch.arange(len(groups)), torch.tensor(groups)
    return Now(
        mask=torch.ones(len(groups)),
        row=row,
        group=group,
        row_group=group,
        rows=len(groups),
        groups=max(groups) + 1,
        step=1,
        logprobs=logprobs,
    )


def gradient_of(groups: list[int], signs: list[int]) -> tuple[list[float], list[float], Any]:
    """Losses by group, the gradient by row, and the metrics."""
    logprobs = torch.linspace(-1.0, -0.2, len(groups)).requires_grad_()
    reference = Tensors({"logprobs": torch.full((len(groups),), -0.5)})
    terms = loss_formulas.dpo(
        packed(logprobs, groups), Tensors({"sign": torch.tensor(signs)}), reference, beta=0.3
    )
    terms.loss.sum().backward()
    assert logprobs.grad is not None
    return terms.loss.tolist(), logprobs.grad.tolist(), terms.metrics


def test_a_preference_that_lost_a_row_teaches_nothing() -> None:
    losses, gradient, metrics = gradient_of([0, 0, 1, 2, 2], [1, -1, 1, -1, 1])
    assert losses[1] == 0.0
    assert gradient[2] == 0.0
    assert min(losses[0], losses[2]) > 0.0
    assert all(gradient[row] != 0.0 for row in (0, 1, 3, 4))
    assert int(metrics["dpo/accuracy"][1]) == 2


def test_trajectory_balance_of_one_row_is_0() -> None:
    logprobs = torch.tensor([-1.0, -0.5, -0.2]).requires_grad_()
    score = Tensors({"reward": torch.tensor([1.0, 0.0, 0.5])})
    reference = Tensors({"logprobs": torch.full((3,), -0.5)})
    terms = loss_formulas.trajectory_balance(
        packed(logprobs, [0, 0, 1]), score, reference, beta=1.0
    )
    assert terms.loss[1].item() == 0.0
    assert terms.loss[0].item() > 0.0
