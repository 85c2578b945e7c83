"""RLOO: REINFORCE whose baseline is the mean of the group's other rows (arXiv:2402.14740).

Use it when one update per Step is enough: the plain, unbiased method of groups.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import group_advantage, kl_in_reward
from operators.data import prompts
from operators.evaluation import held_out
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import policy_gradient_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import train


@declares
def rloo(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    n: int = 8,
    batch: int = 64,
    max_tokens: int = 512,
    beta: float = 0.05,
    lr: Number = 1e-6,
    max_lag: int = 0,
    adapter: Adapter = None,
    eval_data: str | None = None,
    eval_every: int = 50,
) -> Graph:
    """Answers are actions: no ratio, no clip, one update per Step; the KL penalty is in the reward.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        reward_fn: a function with TRL's signature, module:function on the command line.
        n: answers to each prompt.
        batch: prompts per Step.
        max_tokens: longest answer.
        beta: weight of the KL penalty in the reward.
        lr: learning rate, or a schedule of the Step.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
        eval_data: held-out prompts, which the policy answers greedily; None: no evaluation.
        eval_every: Steps between evaluations; one comes before the first Step, one at the end.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, n=n, max_tokens=max_tokens, max_lag=max_lag, name="rollout")
    reference = logprobs(Model("reference", base), rollout)
    outcome = reward(reward_fn, rollout, name="score")
    score = kl_in_reward(rollout, outcome, reference, beta=beta)
    advantage = group_advantage(
        rollout, score, baseline="leave_one_out", scale="none", name="advantage"
    )
    loss = policy_gradient_loss(advantage)
    sink = train(policy, rollout, loss=loss, lr=lr, aggregate="sequence_sum")
    evaluation = held_out(policy, eval_data, reward_fn, every=eval_every, max_tokens=max_tokens)
    return Graph("rloo", sink, *evaluation)
