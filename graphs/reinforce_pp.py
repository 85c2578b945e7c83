"""REINFORCE++: PPO without a critic, advantages normalised over the batch (arXiv:2501.03262).

Use it when prompts are many, and one answer to each is what you can afford.
"""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import kl_in_reward, returns, whiten
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import train


def reinforce_pp(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    batch: int = 256,
    max_tokens: int = 512,
    beta: float = 0.01,
    lr: Number = 1e-6,
    minibatches: int = 1,
    max_lag: int = 0,
) -> Graph:
    """The return of each token, with the KL penalty in the reward, whitened over the whole Step.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet or JSONL of prompts, or a reasoning_gym: task.
        reward_fn: a function with TRL's signature, module:function on the command line.
        batch: prompts per Step.
        max_tokens: longest answer.
        beta: weight of the KL penalty in the reward.
        lr: learning rate, or a schedule of the Step.
        minibatches: updates per Step.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
    """
    policy = Model("policy", base, trainable=True)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, max_tokens=max_tokens, max_lag=max_lag, name="rollout")
    reference = logprobs(Model("reference", base), rollout)
    score = kl_in_reward(rollout, reward(reward_fn, rollout, name="score"), reference, beta=beta)
    advantage = whiten(returns(rollout, score), rollout, name="advantage")
    old = logprobs(policy, rollout, name="old")
    loss = clipped_policy_loss(advantage, old=old)
    return Graph("reinforce_pp", train(policy, rollout, loss=loss, lr=lr, minibatches=minibatches))
