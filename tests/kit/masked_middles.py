"""Small importable graphs whose rows have tokens in their middle that the model did not write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Rollout
from dataflow.user import Columns, operator
from operators.advantage import gae, group_advantage, kl_in_reward, whiten
from operators.forward import logprobs, values
from operators.losses import clipped_policy_loss, entropy_loss, importance, kl_loss, value_loss
from operators.reward import reward
from operators.train import train
from tests.kit.run_graphs import rolled_out, vowels


@operator()
def answered(rollout: Columns[Rollout], *, filler: float) -> Columns[Rollout]:
    """Every third token, from the second on, is one that the row was answered: mask 0, and a
    log-prob that no sampler recorded.
    """
    mask = rollout["completion_mask"]
    starts = np.repeat(mask.offsets[:-1], mask.lengths)
    is_answer = (np.arange(len(mask.values)) - starts) % 3 == 1
    recorded = rollout["sampler_logprobs"].values
    written = np.where(is_answer, np.uint8(0), mask.values).astype(np.uint8)
    filled = np.where(is_answer, np.float32(filler), recorded).astype(np.float32)
    return rollout.set(completion_mask=mask.like(written), sampler_logprobs=mask.like(filled))


def _episodes(folder: Path, filler: float, **how: Any) -> tuple[Model, Port[Rollout]]:
    policy, rollout = rolled_out(folder, **how)
    return policy, answered(rollout, filler=filler)


def masked_grpo(folder: Path, filler: float = 0.0) -> Graph:
    """Groups of four, two updates, weights of importance by rows, a KL and an entropy."""
    policy, episodes = _episodes(folder, filler, n=4)
    advantage = group_advantage(
        episodes, reward(vowels, episodes, name="score"), baseline="length_weighted", scale="none"
    )
    reference = logprobs(Model("reference", str(folder / "teacher")), episodes)
    old = logprobs(policy, episodes, name="old")
    clipped = clipped_policy_loss(advantage, old=old, correction=importance("geometric"))
    loss = clipped + 0.04 * kl_loss(reference) + 0.01 * entropy_loss()
    return Graph("masked_grpo", train(policy, episodes, loss=loss, lr=1e-3, minibatches=2))


def masked_ppo(folder: Path, filler: float = 0.0) -> Graph:
    """A critic, GAE, a KL in the reward, whitened advantages; ratios to the recorded log-probs."""
    policy, episodes = _episodes(folder, filler)
    critic = Model("critic", str(folder / "model"), trainable=True, head="scalar")
    reference = logprobs(Model("reference", str(folder / "teacher")), episodes)
    score = kl_in_reward(
        episodes, reward(vowels, episodes, name="score"), reference, beta=0.05, kind="k3"
    )
    value = values(critic, episodes)
    advantage = gae(episodes, score, value, gamma=0.99, lam=0.95)
    actor = train(
        policy, episodes, loss=clipped_policy_loss(whiten(advantage, episodes)), lr=1e-3, epochs=2
    )
    judge = train(critic, episodes, loss=value_loss(advantage, old=value, clip=0.2), lr=1e-3)
    return Graph("masked_ppo", actor, judge)
