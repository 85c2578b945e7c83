"""Dr. GRPO: GRPO without the biases of its divisors (arXiv:2503.20783).

Use it when answers grow longer without getting better, or prompts differ in difficulty.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import group_advantage
from operators.data import prompts
from operators.evaluation import held_out
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.select import mixed_groups, select
from operators.train import train


@declares
def dr_grpo(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    n: int = 8,
    batch: int = 64,
    max_tokens: int = 512,
    lr: Number = 1e-6,
    minibatches: int = 1,
    max_lag: int = 0,
    adapter: Adapter = None,
    drop_uniform: bool = False,
    eval_data: str | None = None,
    eval_every: int = 50,
) -> Graph:
    """GRPO without the group's deviation, and with one divisor for long and short answers.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        reward_fn: a function with TRL's signature, module:function on the command line.
        n: answers to each prompt.
        batch: prompts per Step.
        max_tokens: longest answer.
        lr: learning rate, or a schedule of the Step.
        minibatches: updates per Step.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
        drop_uniform: leave out groups whose rewards are all equal: their advantages are all 0.
        eval_data: held-out prompts, which the policy answers greedily; None: no evaluation.
        eval_every: Steps between evaluations; one comes before the first Step, one at the end.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, n=n, max_tokens=max_tokens, max_lag=max_lag, name="rollout")
    score = reward(reward_fn, rollout, name="score")
    if drop_uniform:
        rollout, score = select(rollout, score, where=mixed_groups(score))
    advantage = group_advantage(rollout, score, scale="none", name="advantage")
    loss = clipped_policy_loss(advantage, clip=0.2)
    sink = train(policy, rollout, loss=loss, lr=lr, aggregate="constant", minibatches=minibatches)
    evaluation = held_out(policy, eval_data, reward_fn, every=eval_every, max_tokens=max_tokens)
    return Graph("dr_grpo", sink, *evaluation)
