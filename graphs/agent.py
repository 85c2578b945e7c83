"""GRPO over episodes: GRPO with `interact` in place of `generate` (arXiv:2402.03300).

Use it where a model calls tools, or talks to an environment, over several turns.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.advantage import group_advantage
from operators.data import prompts
from operators.environments import EnvironmentClass
from operators.interact import interact
from operators.losses import clipped_policy_loss
from operators.train import train
from operators.turns import turn_reward


@declares
def agent(
    base: str,
    data: str,
    environment: EnvironmentClass,
    *,
    n: int = 8,
    batch: int = 64,
    max_turns: int = 8,
    max_turn_tokens: int | None = None,
    max_tokens: int = 4096,
    lr: Number = 1e-6,
    minibatches: int = 1,
    max_lag: int = 0,
    adapter: Adapter = None,
) -> Graph:
    """Group-relative policy optimisation of episodes, by the rewards that their environments give.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        environment: a class with reset and step, or tools; module:name on the command line.
        n: episodes of each prompt.
        batch: prompts per Step.
        max_turns: the most turns of an episode.
        max_turn_tokens: the most tokens of a turn; None: what max_tokens leaves.
        max_tokens: the most tokens of an episode, written and answered.
        lr: learning rate, or a schedule of the Step.
        minibatches: updates per Step.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    episode = interact(
        policy,
        prompts(data, batch=batch),
        environment,
        n=n,
        max_turns=max_turns,
        max_turn_tokens=max_turn_tokens,
        max_tokens=max_tokens,
        max_lag=max_lag,
        name="episode",
    )
    score = turn_reward(episode, name="score")
    advantage = group_advantage(episode, score, name="advantage")
    loss = clipped_policy_loss(advantage, clip=0.2)
    return Graph("agent", train(policy, episode, loss=loss, lr=lr, minibatches=minibatches))
