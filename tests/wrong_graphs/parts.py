"""What the wrong graphs share: one policy, its prompts, a reward. Messages name lines here, too."""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.loss import Loss
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.schema import Advantage, Completion, Prompt, Reward, Rollout
from operators.advantage import group_advantage
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train
from tests.kit.rewards import exact

BASE = "models/tiny"
DATA = "data/train.parquet"

policy = Model("policy", BASE, trainable=True)
critic = Model("critic", BASE, trainable=True, head="scalar")


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
    loss = loss or clipped_policy_loss(compared(rows))
    return train(policy, rows, loss=loss, lr=1e-6, minibatches=minibatches)


def graph(*sinks: Node) -> Graph:
    """All of them under one name."""
    return Graph("wrong", *sinks)


def trained(rows: Port[Completion], loss: Loss | None = None, minibatches: int = 1) -> Graph:
    """The policy's training alone."""
    return graph(updated(rows, loss, minibatches))


def compared_with(reference: Model) -> Graph:
    """The policy's training with a divergence from this Model."""
    rollout = sampled()
    how = {"reference": logprobs(reference, rollout), "beta": 0.1}
    return trained(rollout, clipped_policy_loss(compared(rollout), **how))
