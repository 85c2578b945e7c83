"""PPO with a critic: written out flat, and as an edit of GRPO (arXiv:1707.06347)."""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.model import Model, Number
from dataflow.schema import Reward, Rollout
from graphs.grpo import grpo
from operators.advantage import gae, kl_in_reward, whiten
from operators.data import prompts
from operators.forward import logprobs, values
from operators.generate import generate
from operators.losses import clipped_policy_loss, value_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import train


def ppo(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    batch: int = 256,
    max_tokens: int = 512,
    beta: float = 0.05,
    lr: Number = 1e-6,
    critic_lr: Number = 1e-5,
    epochs: int = 4,
    minibatches: int = 4,
    max_lag: int = 0,
) -> Graph:
    """Proximal policy optimisation, KL in the reward.

    Args:
        base: Hugging Face model directory or hub name, of the policy, the reference and the critic.
        data: Parquet or JSONL of prompts, or a reasoning_gym: task.
        reward_fn: a function with TRL's signature, module:function on the command line.
        batch: prompts per Step.
        max_tokens: longest answer.
        beta: weight of the KL penalty in the reward.
        lr: the policy's learning rate.
        critic_lr: the critic's learning rate.
        epochs: passes over the Step's rows.
        minibatches: updates per pass.
        max_lag: how many versions old a row's weights may be when it is trained.
    """
    policy, critic = (
        Model("policy", base, trainable=True),
        Model("critic", base, trainable=True, head="scalar"),
    )
    rollout = generate(
        policy, prompts(data, batch=batch), max_tokens=max_tokens, max_lag=max_lag, name="rollout"
    )
    reference, old = (
        logprobs(Model("reference", base), rollout),
        logprobs(policy, rollout, name="old"),
    )
    score = kl_in_reward(rollout, reward(reward_fn, rollout, name="score"), reference, beta=beta)
    value = values(critic, rollout)
    advantage = gae(rollout, score, value, gamma=1.0, lam=0.95)
    policy_loss = clipped_policy_loss(whiten(advantage, rollout), old=old)
    critic_loss = value_loss(advantage, old=value, clip=0.2)
    return Graph(
        "ppo",
        train(policy, rollout, loss=policy_loss, lr=lr, epochs=epochs, minibatches=minibatches),
        train(
            critic, rollout, loss=critic_loss, lr=critic_lr, epochs=epochs, minibatches=minibatches
        ),
    )


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
    """PPO as an edit of GRPO: another advantage, and a critic.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet or JSONL of prompts, or a reasoning_gym: task.
        reward_fn: a function with TRL's signature, module:function on the command line.
        batch: prompts per Step.
        max_tokens: longest answer.
        lr: the policy's learning rate.
        critic_lr: the critic's learning rate.
    """
    g = grpo(base, data, reward_fn, n=1, batch=batch, max_tokens=max_tokens, lr=lr)
    rollout, score = g.port("rollout", Rollout), g.port("score", Reward)
    critic = Model("critic", base, trainable=True, head="scalar")
    value = values(critic, rollout)
    advantage = gae(rollout, score, value)
    return (
        g.replace(advantage=advantage)
        .extend(train(critic, rollout, loss=value_loss(advantage, old=value), lr=critic_lr))
        .renamed("ppo")
    )
