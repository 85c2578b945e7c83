"""PPO: a critic, and several clipped updates on the rows of a Step (arXiv:1707.06347).

Use it when the tokens of an answer deserve different credit, and a critic fits into memory.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import gae, kl_in_reward, whiten
from operators.data import prompts
from operators.evaluation import held_out
from operators.forward import logprobs, values
from operators.generate import generate
from operators.losses import clipped_policy_loss, value_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import train


@declares
def ppo(
    base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    batch: int = 256,
    max_tokens: int = 512,
    beta: float = 0.05,
    lr: Number = 1e-6,
    critic_lr: Number = 1e-5,
    epochs: int = 4,
    minibatches: int = 4,
    max_lag: int = 0,
    adapter: Adapter = None,
    eval_data: str | None = None,
    eval_every: int = 50,
) -> Graph:
    """A critic of its own, GAE, and several clipped updates per Step; KL in the reward.

    Args:
        base: Hugging Face model directory or hub name, of the policy, the reference and the critic.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        reward_fn: a function with TRL's signature, module:function on the command line.
        batch: prompts per Step.
        max_tokens: longest answer.
        beta: weight of the KL penalty in the reward.
        lr, critic_lr: learning rate, or a schedule of the Step.
        epochs, minibatches: passes over the Step's rows, and updates per pass.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
        eval_data: held-out prompts, which the policy answers greedily; None: no evaluation.
        eval_every: Steps between evaluations; one comes before the first Step, one at the end.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    critic = Model("critic", base, trainable=True, head="scalar", adapter=adapter)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, max_tokens=max_tokens, max_lag=max_lag, name="rollout")
    reference = logprobs(Model("reference", base), rollout)
    outcome = reward(reward_fn, rollout, name="score")
    score = kl_in_reward(rollout, outcome, reference, beta=beta)
    value = values(critic, rollout)
    old = logprobs(policy, rollout, name="old")
    advantage = gae(rollout, score, value, gamma=1.0, lam=0.95)
    clipped = clipped_policy_loss(whiten(advantage, rollout), old=old)
    fit = value_loss(advantage, old=value, clip=0.2)
    actor = train(policy, rollout, loss=clipped, lr=lr, epochs=epochs, minibatches=minibatches)
    judge = train(critic, rollout, loss=fit, lr=critic_lr, epochs=epochs, minibatches=minibatches)
    evaluation = held_out(policy, eval_data, reward_fn, every=eval_every, max_tokens=max_tokens)
    return Graph("ppo", actor, judge, *evaluation)
