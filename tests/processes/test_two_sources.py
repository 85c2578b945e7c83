"""Runs in which one Model is trained on rows of two sources at once, by terms of one loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow.graph import Graph
from operators.advantage import group_advantage
from operators.data import demonstrations
from operators.generate import generate
from operators.losses import clipped_policy_loss, supervised_loss
from operators.optimizers import AdamW
from operators.reward import reward
from operators.train import train
from tests.kit import plain_loop as loop
from tests.kit import runs
from tests.kit.run_graphs import policy_and_prompts, vowels
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)


def sft_and_rl(folder: Path, *, max_lag: int = 0, batch: int = 2, **how: Any) -> Graph:
    """Answers of the policy, and demonstrations, half the weight."""
    policy, asked = policy_and_prompts(folder)
    rollout = generate(
        policy, asked, n=4, max_tokens=5, temperature=0.8, max_lag=max_lag, name="rollout"
    )
    advantage = group_advantage(rollout, reward(vowels, rollout, name="score"), name="advantage")
    demos = demonstrations(str(folder / "demos.parquet"), batch=batch, name="demos")
    loss = clipped_policy_loss(advantage) + 0.5 * supervised_loss(rows=demos)
    given = {"lr": 2e-3, "optimizer": AdamW(eps=loop.EPS)} | how
    return Graph("sft_and_rl", train(policy, rollout, loss=loss, **given))


def test_both_sources_have_their_batch_in_each_step(tiny: TinyRuns) -> None:
    result = tiny.run(sft_and_rl, 3)
    for row in runs.metrics(result):
        assert row["data/prompts"] == 4 + 2
        assert row["policy/lag/max"] == 0
        assert row["loss/supervised_loss"] > 0
        assert "loss/clipped_policy_loss" in row
        assert row["optim/updates"] == 1
