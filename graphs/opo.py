"""OPO: exactly on-policy, with the baseline of least variance (arXiv:2505.23585).

Use it when answers differ much in length, and one exact update per Step is enough.
"""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import policy_gradient_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import train


def opo(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    n: int = 8,
    batch: int = 64,
    max_tokens: int = 512,
    lr: Number = 1e-6,
) -> Graph:
    """The baseline weighs each answer's reward by its length; one update per Step, no ratio, no KL.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet or JSONL of prompts, or a reasoning_gym: task.
        reward_fn: a function with TRL's signature, module:function on the command line.
        n: answers to each prompt.
        batch: prompts per Step.
        max_tokens: longest answer.
        lr: learning rate, or a schedule of the Step.
    """
    policy = Model("policy", base, trainable=True)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, n=n, max_tokens=max_tokens, name="rollout")
    score = reward(reward_fn, rollout, name="score")
    advantage = group_advantage(rollout, score, baseline="length_weighted", scale="none")
    loss = policy_gradient_loss(advantage)
    return Graph("opo", train(policy, rollout, loss=loss, lr=lr))
