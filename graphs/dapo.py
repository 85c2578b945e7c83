"""DAPO: full batches of mixed groups, a wider clip above, a soft limit (arXiv:2503.14476).

Use it when many groups have equal rewards, or answers run into their limit.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import group_advantage, overlong_penalty
from operators.data import prompts
from operators.evaluation import held_out
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.select import mixed_groups, select
from operators.train import train


@declares
def dapo(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    n: int = 16,
    batch: int = 512,
    max_tokens: int = 20480,
    buffer: int = 4096,
    lr: Number = 1e-6,
    minibatches: int = 16,
    max_lag: int = 0,
    adapter: Adapter = None,
    eval_data: str | None = None,
    eval_every: int = 50,
) -> Graph:
    """Replace groups of equal rewards, punish the last tokens before the limit, clip less above.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        reward_fn: a function with TRL's signature, module:function on the command line.
        n: answers to each prompt.
        batch: prompts per Step.
        max_tokens: longest answer.
        buffer: how many of the last tokens before max_tokens are punished.
        lr: learning rate, or a schedule of the Step.
        minibatches: updates per Step.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
        eval_data: held-out prompts, which the policy answers greedily; None: no evaluation.
        eval_every: Steps between evaluations; one comes before the first Step, one at the end.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, n=n, max_tokens=max_tokens, max_lag=max_lag, name="rollout")
    score = reward(reward_fn, rollout, name="score")
    rollout, score = select(rollout, score, where=mixed_groups(score), refill=True)
    shaped = overlong_penalty(rollout, score, max_tokens=max_tokens, buffer=buffer)
    advantage = group_advantage(rollout, shaped, name="advantage")
    loss = clipped_policy_loss(advantage, clip=(0.2, 0.28))
    sink = train(policy, rollout, loss=loss, lr=lr, minibatches=minibatches)
    evaluation = held_out(policy, eval_data, reward_fn, every=eval_every, max_tokens=max_tokens)
    return Graph("dapo", sink, *evaluation)
