"""GRPO that begins the longest answers first, by a small Model's ranking (arXiv:2408.15792).

Use it where answers differ much in length, and most prompts come once.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import group_advantage
from operators.data import prompts
from operators.evaluation import held_out
from operators.forward import scores
from operators.generate import generate
from operators.losses import clipped_policy_loss, rank_loss, ranks
from operators.mean_over import mean_over
from operators.reward import reward
from operators.rewards import RewardFn
from operators.row_weights import answer_length, prompt_rows, weight_of
from operators.train import train


@declares
def grpo_ranked(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    ranker_base: str,
    n: int = 8,
    batch: int = 64,
    max_tokens: int = 512,
    lr: Number = 1e-6,
    ranker_lr: Number = 1e-5,
    every: int = 1,
    max_lag: int = 0,
    adapter: Adapter = None,
    eval_data: str | None = None,
    eval_every: int = 50,
) -> Graph:
    """GRPO, and a ranker that learns from the lengths of each Step's answers.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        reward_fn: a function with TRL's signature, module:function on the command line.
        ranker_base: Hugging Face model directory or hub name of the ranker, much smaller than base.
        n: answers to each prompt.
        batch: prompts per Step.
        max_tokens: longest answer.
        lr: learning rate, or a schedule of the Step.
        ranker_lr: that of the ranker.
        every: the ranker is trained in each `every`-th Step.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
        eval_data: held-out prompts, which the policy answers greedily; None: no evaluation.
        eval_every: Steps between evaluations; one comes before the first Step, one at the end.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    ranker = Model("ranker", ranker_base, trainable=True, head="scalar")
    prompt = prompts(data, batch=batch)
    tasks = prompt_rows(prompt, name="tasks")
    rank = scores(ranker, tasks, max_lag=max_lag, name="rank")
    weight = weight_of(rank)
    rollout = generate(
        policy, prompt, weight=weight, n=n, max_tokens=max_tokens, max_lag=max_lag, name="rollout"
    )
    score = reward(reward_fn, rollout, name="score")
    loss = clipped_policy_loss(group_advantage(rollout, score, name="advantage"), clip=0.2)
    sink = train(policy, rollout, loss=loss, lr=lr)
    order = ranks(rank, mean_over(answer_length(rollout), prompt, name="length"))
    ranked = train(ranker, tasks, loss=rank_loss(order), lr=ranker_lr, every=every)
    evaluation = held_out(policy, eval_data, reward_fn, every=eval_every, max_tokens=max_tokens)
    return Graph("grpo_ranked", sink, ranked, *evaluation)
