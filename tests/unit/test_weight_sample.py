"""Whether a Step changed the weights, told from the weights themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from engine.session.learning import TrainedModel, find_standstills
from operators.kernels.torch.weight_sample import MOST, WeightSample
from operators.optimizers import AdamW
from tests.kit.rows import random_rows, with_tokens
from tests.kit.training import PG, distance, opened, weights_of, with_advantage

POLICY = TrainedModel(name="policy", prefix="optim/", start=0)


@pytest.fixture
def rows() -> Batch:
    return random_rows(3, 2)


def transposed(rows: int, columns: int) -> torch.Tensor:
    """A matrix whose columns lie one after another in memory."""
    return torch.zeros(columns, rows).T


@pytest.mark.parametrize(
    "params", [{"optimizer": AdamW(eps=1e30)}, {"clip_norm": 1e-25}], ids=["eps", "clip_norm"]
)
def test_updates_that_float32_rounds_away_are_told(
    bases: dict[str, str], rows: Batch, params: dict[str, Any]
) -> None:
    """Of llama: qwen2 begins with biases of 0, to which the least number can be added."""
    kernel = opened(bases["llama"], PG, minibatches=2, **params)
    before = weights_of(kernel)
    metrics = kernel.step(with_advantage(rows))
    assert distance(weights_of(kernel), before) == 0.0
    assert (metrics["optim/updates"], metrics["optim/changed"]) == (2.0, 0.0)
    assert metrics["optim/grad_norm"] > 0.0
    standstill = find_standstills((POLICY,), metrics, 1, None)["policy"]
    assert standstill is not None
    assert "its updates changed none of the weights that were compared" in standstill.cause


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_updates_are_no_standstill(base: str, rows: Batch, dtype: str) -> None:
    """Those too that add up in the float32 copy, and change no bfloat16 weight yet."""
    kernel = opened(base, PG, dtype=dtype, lr=1e-6)
    metrics = kernel.step(with_advantage(rows))
    assert 0.9 < metrics["optim/changed"] <= 1.0
    assert find_standstills((POLICY,), metrics, 1, None) == {"policy": None}


def test_a_rate_that_moves_only_the_least_weights_moves_a_small_share(
    bases: dict[str, str], rows: Batch
) -> None:
    metrics = opened(bases["llama"], PG, lr=1e-9).step(with_advantage(rows))
    assert 0.0 < metrics["optim/changed"] < 0.2


def test_a_step_without_an_update_does_not_tell(base: str, rows: Batch) -> None:
    """It begins later, has no row, or no token to train."""
    kernel = opened(base, PG, start=2)
    none = rows.take(np.zeros(len(rows), dtype=bool))
    masked = with_tokens(rows, completion_mask=np.zeros_like(rows.ragged("completion_mask").values))
    for step, given in enumerate((rows, none, masked), start=1):
        assert "optim/changed" not in kernel.step(with_advantage(given, step))
    assert kernel.step(with_advantage(rows, 4))["optim/changed"] > 0.0


@pytest.mark.parametrize(("weight", "size"), [
    (torch.zeros(()), 1),
    (torch.zeros(MOST), MOST),
    (torch.zeros(0, 7), 0),
    (torch.zeros(1000, 32), MOST),
    (torch.zeros(5, 40, 30), MOST),
    (transposed(300, 20), 20),
], ids=["number", "vector", "empty", "matrix", "experts", "transposed"])  # fmt: skip
def test_weights_of_any_shape_are_seen_to_change(weight: torch.Tensor, size: int) -> None:
    other = torch.zeros(3)
    sample = WeightSample([weight, other])
    assert size // 2 + 3 <= len(sample) <= size + 3
    assert int(sample.count_changed()) == 0
    weight += 1.0
    assert int(sample.count_changed()) == len(sample) - 3


def test_a_sample_of_a_matrix_is_of_many_columns() -> None:
    matrix = torch.zeros(MOST * 4, 32)
    sample = WeightSample([matrix])
    matrix[:, 0] = 1.0
    assert int(sample.count_changed()) <= len(sample) // 8


def test_weights_are_compared_by_their_bits() -> None:
    weights = torch.tensor([0.0, float("nan"), 1.0])
    sample = WeightSample([weights])
    assert int(sample.count_changed()) == 0
    weights[0] = -0.0
    assert int(sample.count_changed()) == 1
