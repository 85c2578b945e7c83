"""Online DPO: pairs of the policy's own answers, ranked by the reward (arXiv:2402.04792).

Use it when a reward ranks answers, and its scale means nothing.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.data import prompts
from operators.evaluation import held_out
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import dpo_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.select import pair, select
from operators.train import train


@declares
def online_dpo(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    n: int = 4,
    batch: int = 64,
    max_tokens: int = 512,
    beta: float = 0.1,
    lr: Number = 5e-7,
    max_lag: int = 0,
    adapter: Adapter = None,
    eval_data: str | None = None,
    eval_every: int = 50,
) -> Graph:
    """The best and the worst answer to each prompt are a pair; equal rewards make none.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        reward_fn: a function with TRL's signature, module:function on the command line.
        n: answers to each prompt.
        batch: prompts per Step.
        max_tokens: longest answer.
        beta: how far the policy may move from the base.
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
    pairs = pair(score)
    rollout, pairs = select(rollout, pairs, where=pairs, refill=True)
    reference = logprobs(Model("reference", base), rollout)
    loss = dpo_loss(pairs, reference=reference, beta=beta)
    sink = train(policy, rollout, loss=loss, lr=lr)
    evaluation = held_out(policy, eval_data, reward_fn, every=eval_every, max_tokens=max_tokens)
    return Graph("online_dpo", sink, *evaluation)
