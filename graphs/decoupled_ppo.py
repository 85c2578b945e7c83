"""Decoupled PPO (AReaL): clipped around the policy before the Step (arXiv:2505.24298).

Use it when generation and training overlap, so that rows are several versions old.
"""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import group_advantage
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import decoupled_policy_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import train


def decoupled_ppo(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    n: int = 16,
    batch: int = 64,
    max_tokens: int = 512,
    lr: Number = 1e-6,
    minibatches: int = 4,
    max_lag: int = 4,
) -> Graph:
    """Asynchronous: rows of several versions; the sampler's log-probs only weigh, they do not clip.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet or JSONL of prompts, or a reasoning_gym: task.
        reward_fn: a function with TRL's signature, module:function on the command line.
        n: answers to each prompt.
        batch: prompts per Step.
        max_tokens: longest answer.
        lr: learning rate, or a schedule of the Step.
        minibatches: updates per Step.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
    """
    policy = Model("policy", base, trainable=True)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, n=n, max_tokens=max_tokens, max_lag=max_lag, name="rollout")
    score = reward(reward_fn, rollout, name="score")
    proximal = logprobs(policy, rollout, name="proximal")
    advantage = group_advantage(rollout, score, name="advantage")
    loss = decoupled_policy_loss(advantage, proximal=proximal)
    return Graph("decoupled_ppo", train(policy, rollout, loss=loss, lr=lr, minibatches=minibatches))
