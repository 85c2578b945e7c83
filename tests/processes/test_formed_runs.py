"""Runs with a lag whose Steps are cut into parts once they are formed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow.graph import Graph
from dataflow.model import Model
from engine.api import rerun, resume
from operators.advantage import group_advantage
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import decoupled_policy_loss
from operators.reward import reward
from operators.train import train
from tests.kit.processes import KillWorkers
from tests.kit.run_graphs import vowels
from tests.kit.runs import metrics
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)
FORMED: dict[str, Any] = {"workers": "apart", "stream": "ordered", "part_tokens": 60}


def graph(folder: Path) -> Graph:
    """GRPO with a lag; the proximal log-probs are computed once the Step is formed."""
    policy = Model("policy", str(folder / "model"), trainable=True)
    source = prompts(str(folder / "train.parquet"), batch=6)
    rollout = generate(policy, source, n=4, max_tokens=24, max_lag=1, name="rollout")
    advantage = group_advantage(rollout, reward(vowels, rollout, name="score"))
    loss = decoupled_policy_loss(advantage, proximal=logprobs(policy, rollout, name="old"))
    return Graph("formed", train(policy, rollout, loss=loss, lr=1e-3))


def test_a_formed_step_is_trained_in_parts_and_run_again_to_the_bit(tiny: TinyRuns) -> None:
    run = tiny.run(graph, 3, name="formed", record="all", checkpoint_every=1, **FORMED)
    assert "parts of 60 tokens once a Step is formed" in (run.folder / "plan.txt").read_text()
    again = rerun(run.folder, ["train_policy"], 3)
    assert again.same, again.nodes
    assert again.nodes[0].promise == "bits"
    steps = [row for row in metrics(run) if "optim/grad_norm" in row]
    assert [row["data/prompts"] for row in steps] == [6.0] * 3
    assert all(row["optim/grad_norm"] > 0 for row in steps)


def test_ranks_train_parts_and_a_run_goes_on_after_deaths_and_from_its_folder(
    tiny: TinyRuns,
) -> None:
    death = KillWorkers({1: "old", 2: "train_policy"})
    ranks = {"ranks": {"train_policy": 2}}
    run = tiny.run(graph, 3, name="killed", on_step=[death], **ranks, **FORMED)
    assert len(death.killed) == 2
    more = resume(run.folder, steps=4)
    steps = [row["step"] for row in metrics(more) if "optim/grad_norm" in row]
    assert steps[-1] == 4
