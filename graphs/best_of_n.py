"""Best of n, or expert iteration: imitate the best answer to each prompt (arXiv:2308.08998).

Use it when good answers are rare and clear: no negative examples, so nothing diverges.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.data import prompts
from operators.evaluation import held_out
from operators.generate import generate
from operators.losses import supervised_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.select import best_of, select
from operators.train import train


@declares
def best_of_n(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    n: int = 8,
    batch: int = 64,
    max_tokens: int = 512,
    above: float = 0.5,
    lr: Number = 1e-5,
    max_lag: int = 0,
    adapter: Adapter = None,
    eval_data: str | None = None,
    eval_every: int = 50,
) -> Graph:
    """Supervised training on the best of n answers, where it is good enough.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        reward_fn: a function with TRL's signature, module:function on the command line.
        n: answers to each prompt.
        batch: prompts per Step.
        max_tokens: longest answer.
        above: the reward that the best answer has to exceed.
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
    best = select(rollout, where=best_of(score, k=1, above=above))
    sink = train(policy, best, loss=supervised_loss(), lr=lr)
    evaluation = held_out(policy, eval_data, reward_fn, every=eval_every, max_tokens=max_tokens)
    return Graph("best_of_n", sink, *evaluation)
