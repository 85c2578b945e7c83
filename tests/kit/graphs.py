"""The parts of one small GRPO graph on the model directory `tiny` (`plans.save_tiny_header`)."""

from __future__ import annotations

from typing import Any

from dataflow.graph import Graph
from dataflow.loss import Loss
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.schema import Advantage, Prompt, Reward, Rollout
from dataflow.user import Columns, operator
from graphs.grpo import grpo
from graphs.ppo import ppo
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train
from tests.kit.rewards import exact

BASE, DATA = "tiny", "train.parquet"
policy = Model("policy", BASE, trainable=True)


def sampled(n: int = 8, *, batch: int = 64, max_tokens: int = 32, **params: Any) -> Port[Rollout]:
    """Answers of the policy; params: of `generate`."""
    source = prompts(DATA, batch=batch)
    return generate(policy, source, n=n, max_tokens=max_tokens, name="rollout", **params)


def scored(rollout: Port[Rollout]) -> Port[Reward]:
    return reward(exact, rollout, name="score")


def compared(rollout: Port[Rollout], score: Port[Reward] | None = None) -> Port[Advantage]:
    """Each answer compared with its group."""
    return group_advantage(rollout, score or scored(rollout), name="advantage")


def trained(rollout: Port[Rollout], loss: Loss | None = None, **params: Any) -> Node:
    """The policy, trained on these rows; params: of `train`."""
    loss = loss or clipped_policy_loss(compared(rollout))
    return train(policy, rollout, loss=loss, **{"lr": 1e-3} | params)


def graph_of(rollout: Port[Rollout], loss: Loss | None = None, **params: Any) -> Graph:
    """A Graph of that one sink."""
    return Graph("g", trained(rollout, loss, **params))


def small_grpo(**params: Any) -> Graph:
    """GRPO as users build it; params: of `grpo`."""
    return grpo(BASE, DATA, exact, **{"beta": 0.04} | params)


def grpo_graph(**params: Any) -> Graph:
    """`small_grpo` without a reference, unless params say otherwise."""
    return small_grpo(**{"beta": 0.0} | params)


def small_ppo(**params: Any) -> Graph:
    """PPO as users build it; params: of `ppo`."""
    return ppo(BASE, DATA, exact, **params)


@operator()
def ask(rollout: Columns[Rollout]) -> Columns[Prompt]:
    asked = [f"Is this right? {c}" for c in rollout["completion"]]
    return Columns.make(Prompt, like=rollout, prompt=asked)
