"""GRPO whose prompts depend on a Table of answers' lengths, so that its every bit counts."""

from __future__ import annotations

from pathlib import Path

from dataflow.graph import Graph
from dataflow.model import Model, Table
from dataflow.schema import Prompt, Weight
from dataflow.user import Columns, operator
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.tables import lookup, record
from operators.train import train
from tests.kit.run_graphs import vowels


@operator()
def weighed(prompt: Columns[Prompt], weight: Columns[Weight]) -> Columns[Prompt]:
    """Prompts that say how much they weigh."""
    pairs = zip(prompt["prompt"], weight["weight"], strict=True)
    return Columns.make(
        Prompt, like=prompt, prompt=[f"{text} {heavy:.6f}" for text, heavy in pairs]
    )


def lengths_graph(folder: Path, *, max_lag: int = 0, batch: int = 8) -> Graph:
    """With 24 prompts, three Steps are an epoch."""
    policy = Model("policy", str(folder / "model"), trainable=True)
    lengths = Table("lengths")
    prompt = prompts(str(folder / "train.parquet"), batch=batch)
    weight = lookup(lengths, prompt, max_lag=max_lag)
    asked = weighed(prompt, weight)
    rollout = generate(policy, asked, n=4, max_tokens=24, max_lag=max_lag, name="rollout")
    score = reward(vowels, rollout, name="score")
    loss = clipped_policy_loss(group_advantage(rollout, score, name="advantage"))
    return Graph("lengths", train(policy, rollout, loss=loss, lr=1e-2), record(lengths, rollout))
