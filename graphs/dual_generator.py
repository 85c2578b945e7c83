"""Two generators, trained on the union of their answers (after DASCO, arXiv:2211.01471).

Use it when one sampler explores too little, or two are to be compared in one group.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import group_advantage
from operators.concat import concat
from operators.data import prompts
from operators.evaluation import held_out
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.select import mixed_groups, select
from operators.train import train


@declares
def dual_generator(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    n: int = 4,
    batch: int = 64,
    max_tokens: int = 512,
    bold: float = 1.3,
    lr: Number = 1e-6,
    max_lag: int = 0,
    adapter: Adapter = None,
    drop_uniform: bool = False,
    eval_data: str | None = None,
    eval_every: int = 50,
) -> Graph:
    """A cautious and a bold sampler of one policy; each group has the answers of both.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        reward_fn: a function with TRL's signature, module:function on the command line.
        n: answers to each prompt.
        batch: prompts per Step.
        max_tokens: longest answer.
        bold: temperature of the second generator.
        lr: learning rate, or a schedule of the Step.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
        drop_uniform: leave out groups whose rewards are all equal: their advantages are all 0.
        eval_data: held-out prompts, which the policy answers greedily; None: no evaluation.
        eval_every: Steps between evaluations; one comes before the first Step, one at the end.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    prompt = prompts(data, batch=batch)
    calm = generate(policy, prompt, n=n, max_tokens=max_tokens, max_lag=max_lag, name="calm")
    wild = generate(
        policy, prompt, n=n, max_tokens=max_tokens, max_lag=max_lag, temperature=bold, name="wild"
    )
    rows = concat(calm, wild, name="rows")
    score = reward(reward_fn, rows, name="score")
    if drop_uniform:
        rows, score = select(rows, score, where=mixed_groups(score))
    advantage = group_advantage(rows, score, name="advantage")
    loss = clipped_policy_loss(advantage)
    sink = train(policy, rows, loss=loss, lr=lr)
    evaluation = held_out(policy, eval_data, reward_fn, every=eval_every, max_tokens=max_tokens)
    return Graph("dual_generator", sink, *evaluation)
