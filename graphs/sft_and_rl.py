"""Supervised and reinforcement training at once: GRPO, and demonstrations with it.

Use it when reinforcement must not lose what demonstrations taught.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import group_advantage
from operators.data import demonstrations, prompts
from operators.evaluation import held_out
from operators.generate import generate
from operators.losses import clipped_policy_loss, supervised_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.select import mixed_groups, select
from operators.train import train


@declares
def sft_and_rl(
    base: str,
    data: str,
    demos: str,
    reward_fn: RewardFn,
    *,
    n: int = 8,
    batch: int = 64,
    demo_batch: int = 32,
    weight: float = 0.1,
    max_tokens: int = 512,
    lr: Number = 1e-6,
    adapter: Adapter = None,
    drop_uniform: bool = False,
    eval_data: str | None = None,
    eval_every: int = 50,
) -> Graph:
    """Each update has a policy loss on rollouts and a supervised loss on demonstrations.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        demos: Parquet, JSONL or CSV with prompt and completion, or messages.
        reward_fn: a function with TRL's signature, module:function on the command line.
        n: answers to each prompt.
        batch: prompts per Step.
        demo_batch: demonstrations per Step.
        weight: weight of the supervised loss.
        max_tokens: longest answer.
        lr: learning rate, or a schedule of the Step.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
        drop_uniform: leave out groups whose rewards are all equal: their advantages are all 0.
        eval_data: held-out prompts, which the policy answers greedily; None: no evaluation.
        eval_every: Steps between evaluations; one comes before the first Step, one at the end.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, n=n, max_tokens=max_tokens, name="rollout")
    score = reward(reward_fn, rollout, name="score")
    if drop_uniform:
        rollout, score = select(rollout, score, where=mixed_groups(score))
    advantage = group_advantage(rollout, score, name="advantage")
    imitation = supervised_loss(rows=demonstrations(demos, batch=demo_batch))
    loss = clipped_policy_loss(advantage) + weight * imitation
    sink = train(policy, rollout, loss=loss, lr=lr)
    evaluation = held_out(policy, eval_data, reward_fn, every=eval_every, max_tokens=max_tokens)
    return Graph("sft_and_rl", sink, *evaluation)
