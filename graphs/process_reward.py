"""Process rewards: a number for each step of an answer (arXiv:2305.20050).

Use it when the steps of an answer can be judged one by one.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import returns, whiten
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import step_reward
from operators.rewards import StepRewardFn
from operators.train import train


@declares
def process_reward(
    base: str,
    data: str,
    step_fn: StepRewardFn,
    *,
    split: str = "\n\n",
    batch: int = 256,
    max_tokens: int = 512,
    lr: Number = 1e-6,
    minibatches: int = 1,
    max_lag: int = 0,
    adapter: Adapter = None,
) -> Graph:
    """Each token's advantage is the whitened sum of the rewards of the steps from there on.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        step_fn: a function that gives each row's `steps` a number each.
        split: what separates the steps of an answer.
        batch: prompts per Step.
        max_tokens: longest answer.
        lr: learning rate, or a schedule of the Step.
        minibatches: updates per Step.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, max_tokens=max_tokens, max_lag=max_lag, name="rollout")
    score = step_reward(step_fn, rollout, split=split, name="score")
    advantage = whiten(returns(rollout, score), rollout, name="advantage")
    old = logprobs(policy, rollout, name="old")
    loss = clipped_policy_loss(advantage, old=old)
    return Graph(
        "process_reward", train(policy, rollout, loss=loss, lr=lr, minibatches=minibatches)
    )
