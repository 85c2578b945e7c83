"""PPO as an edit of GRPO: another advantage, and a critic."""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.schema import Reward, Rollout
from graphs.grpo import grpo
from operators.advantage import gae
from operators.forward import values
from operators.losses import value_loss
from operators.rewards import RewardFn
from operators.train import train


def ppo_from_grpo(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    batch: int = 256,
    max_tokens: int = 512,
    lr: float = 1e-6,
    critic_lr: float = 1e-5,
) -> Graph:
    """The Graph after `replace` and `extend`."""
    g = grpo(base, data, reward_fn, n=1, batch=batch, max_tokens=max_tokens, lr=lr)
    rollout, score = g.port("rollout", Rollout), g.port("score", Reward)
    critic = Model("critic", base, trainable=True, head="scalar")
    value = values(critic, rollout)
    advantage = gae(rollout, score, value)
    return (
        g.replace(advantage=advantage)
        .extend(train(critic, rollout, loss=value_loss(advantage), lr=critic_lr))
        .renamed("ppo")
    )
