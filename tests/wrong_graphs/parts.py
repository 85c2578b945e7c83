"""What the wrong graphs share: one policy, its prompts, a reward. Messages name lines here, too."""

from __future__ import annotations

from typing import Any

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
from operators.train import evaluate, train
from tests.kit.rewards import exact

BASE = "models/tiny"
DATA = "data/train.parquet"

policy = Model("policy", BASE, trainable=True)
critic = Model("critic", BASE, trainable=True, head="scalar")


def source(batch: int | None = 64) -> Port[Prompt]:
    """The training prompts."""
    return prompts(DATA, batch=batch)


def sampled(n: int = 8, batch: int | None = 64, **asked: Any) -> Port[Rollout]:
    """Answers of the policy. asked: of `generate`."""
    return generate(policy, source(batch), n=n, max_tokens=64, name="rollout", **asked)


def scored(rows: Port[Completion]) -> Port[Reward]:
    """The reward of each answer."""
    return reward(exact, rows, name="score")


def compared(rows: Port[Completion]) -> Port[Advantage]:
    """Each answer against its group."""
    return group_advantage(rows, scored(rows), name="advantage")


def updated(rows: Port[Completion], loss: Loss | None = None, **how: Any) -> Node:
    """The policy's training. how: of `train`."""
    return train(policy, rows, loss=loss or clipped_policy_loss(compared(rows)), lr=1e-6, **how)


def graph(*sinks: Node) -> Graph:
    """All of them under one name."""
    return Graph("wrong", *sinks)


def trained(rows: Port[Completion], loss: Loss | None = None, **how: Any) -> Graph:
    """The policy's training alone."""
    return graph(updated(rows, loss, **how))


def judged(rows: Port[Completion], score: Port[Reward]) -> Graph:
    """The policy's training by this score, compared within each group."""
    return trained(rows, clipped_policy_loss(group_advantage(rows, score)))


def held_out() -> Port[Rollout]:
    """Answers to other prompts."""
    prompt = prompts("data/test.parquet", name="held_out")
    return generate(policy, prompt, max_tokens=64, name="answers")


def evaluated(score: Port[Reward], every: int = 10) -> Graph:
    """The policy's training on its own answers, and an evaluation by this score."""
    return graph(updated(sampled()), evaluate(policy, score, every=every))


def compared_with(reference: Model) -> Graph:
    """The policy's training with a divergence from this Model."""
    rollout = sampled()
    near = logprobs(reference, rollout, name="reference")
    return trained(rollout, clipped_policy_loss(compared(rollout), reference=near, beta=0.1))
