"""ReMax: REINFORCE whose baseline is the reward of the greedy answer (arXiv:2310.10505).

Use it when you can afford one or two answers to a prompt: its baseline needs no group.
"""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import baseline_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import policy_gradient_loss
from operators.mean_over import mean_over
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import train


def remax(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    n: int = 1,
    batch: int = 64,
    max_tokens: int = 512,
    lr: Number = 1e-6,
    max_lag: int = 0,
) -> Graph:
    """A second, greedy generation for each prompt gives the baseline of all its sampled answers.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet or JSONL of prompts, or a reasoning_gym: task.
        reward_fn: a function with TRL's signature, module:function on the command line.
        n: answers to each prompt.
        batch: prompts per Step.
        max_tokens: longest answer.
        lr: learning rate, or a schedule of the Step.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
    """
    policy = Model("policy", base, trainable=True)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, n=n, max_tokens=max_tokens, max_lag=max_lag, name="rollout")
    score = reward(reward_fn, rollout, name="score")
    greedy = generate(
        policy, prompt, temperature=0.0, max_tokens=max_tokens, max_lag=max_lag, name="greedy"
    )
    baseline = mean_over(reward(reward_fn, greedy, name="greedy_score"), prompt)
    loss = policy_gradient_loss(baseline_advantage(rollout, score, baseline))
    return Graph("remax", train(policy, rollout, loss=loss, lr=lr, aggregate="sequence_sum"))
