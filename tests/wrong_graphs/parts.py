"""What the wrong graphs share: one policy, its prompts, a reward. Lines here appear in messages
too.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataflow.graph import Graph
from dataflow.loss import Loss
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.schema import Advantage, Completion, Prompt, Reward, Rollout
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train

BASE = "models/tiny"
DATA = "data/train.parquet"

policy = Model("policy", BASE, trainable=True)
critic = Model("critic", BASE, trainable=True, head="scalar")


def exact(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1.0 where a completion is the answer."""
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def source(batch: int | None = 64) -> Port[Prompt]:
    """The training prompts."""
    return prompts(DATA, batch=batch)


def sampled(n: int = 8, batch: int | None = 64, max_lag: int = 0) -> Port[Rollout]:
    """Answers of the policy."""
    return generate(policy, source(batch), n=n, max_tokens=64, max_lag=max_lag, name="rollout")


def scored(rows: Port[Completion]) -> Port[Reward]:
    """The reward of each answer."""
    return reward(exact, rows, name="score")


def compared(rows: Port[Completion]) -> Port[Advantage]:
    """Each answer against its group."""
    return group_advantage(rows, scored(rows), name="advantage")


def updated(rows: Port[Completion], loss: Loss | None = None, minibatches: int = 1) -> Node:
    """The policy's training."""
    return train(
        policy,
        rows,
        loss=loss or clipped_policy_loss(compared(rows)),
        lr=1e-6,
        minibatches=minibatches,
    )


def graph(*sinks: Node) -> Graph:
    """All of them under one name."""
    return Graph("wrong", *sinks)
