"""REINFORCE++: PPO without a critic, advantages normalised over the batch (arXiv:2501.03262).

Use it when prompts are many, and one answer to each is what you can afford.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import kl_in_reward, returns, whiten
from operators.data import prompts
from operators.evaluation import held_out
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import train


@declares
def reinforce_pp(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    batch: int = 256,
    max_tokens: int = 512,
    beta: float = 0.01,
    lr: Number = 1e-6,
    minibatches: int = 1,
    max_lag: int = 0,
    adapter: Adapter = None,
    eval_data: str | None = None,
    eval_every: int = 50,
) -> Graph:
    """The return of each token, with the KL penalty in the reward, whitened over the whole Step.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        reward_fn: a function with TRL's signature, module:function on the command line.
        batch: prompts per Step.
        max_tokens: longest answer.
        beta: weight of the KL penalty in the reward.
        lr: learning rate, or a schedule of the Step.
        minibatches: updates per Step.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
        eval_data: held-out prompts, which the policy answers greedily; None: no evaluation.
        eval_every: Steps between evaluations; one comes before the first Step, one at the end.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, max_tokens=max_tokens, max_lag=max_lag, name="rollout")
    reference = logprobs(Model("reference", base), rollout)
    outcome = reward(reward_fn, rollout, name="score")
    score = kl_in_reward(rollout, outcome, reference, beta=beta)
    advantage = whiten(returns(rollout, score), rollout, name="advantage")
    old = logprobs(policy, rollout, name="old")
    loss = clipped_policy_loss(advantage, old=old)
    sink = train(policy, rollout, loss=loss, lr=lr, minibatches=minibatches)
    evaluation = held_out(policy, eval_data, reward_fn, every=eval_every, max_tokens=max_tokens)
    return Graph("reinforce_pp", sink, *evaluation)
