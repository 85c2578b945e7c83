"""ReMax: REINFORCE whose baseline is the reward of the greedy answer (arXiv:2310.10505).

Use it when you can afford one or two answers to a prompt: its baseline needs no group.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import baseline_advantage
from operators.data import prompts
from operators.evaluation import held_out
from operators.generate import generate
from operators.losses import policy_gradient_loss
from operators.mean_over import mean_over
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import train


@declares
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
    adapter: Adapter = None,
    eval_data: str | None = None,
    eval_every: int = 50,
) -> Graph:
    """A second, greedy generation for each prompt gives the baseline of all its sampled answers.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        reward_fn: a function with TRL's signature, module:function on the command line.
        n: answers to each prompt.
        batch: prompts per Step.
        max_tokens: longest answer.
        lr: learning rate, or a schedule of the Step.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
        eval_data: held-out prompts, which the policy answers greedily; None: no evaluation.
        eval_every: Steps between evaluations; one comes before the first Step, one at the end.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, n=n, max_tokens=max_tokens, max_lag=max_lag, name="rollout")
    score = reward(reward_fn, rollout, name="score")
    greedy = generate(
        policy, prompt, temperature=0.0, max_tokens=max_tokens, max_lag=max_lag, name="greedy"
    )
    baseline = mean_over(reward(reward_fn, greedy, name="greedy_score"), prompt)
    loss = policy_gradient_loss(baseline_advantage(rollout, score, baseline))
    sink = train(policy, rollout, loss=loss, lr=lr, aggregate="sequence_sum")
    evaluation = held_out(policy, eval_data, reward_fn, every=eval_every, max_tokens=max_tokens)
    return Graph("remax", sink, *evaluation)
