"""Tools of your own: plain functions that the model may call, and a reward for what comes of it.

    python examples/agent_calculator.py

What the model is told of a tool comes from its signature and docstring. The chat template has to
show tools; how calls are written is known by the template, too. The tiny model, which is random,
calls none.
"""

from __future__ import annotations

from typing import Any

import tiny

from dataflow import Graph, Model
from engine.api import Result, run
from operators.advantage import group_advantage
from operators.data import prompts
from operators.environments import tools
from operators.interact import interact
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train


# begin: what you add
def add(a: float, b: float) -> float:
    """Adds two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def correct(completions: list[Any], answer: list[str], **kwargs: object) -> list[float]:
    """1 where the model's last message is the answer, up to 0.1 for digits."""
    rewards: list[float] = []
    for conversation, right in zip(completions, answer, strict=True):
        text = conversation[-1]["content"].strip()
        digits = sum(character.isdigit() for character in text)
        rewards.append(1.0 if text == right else 0.1 * digits / max(1, len(text)))
    return rewards


# end


def graph() -> Graph:
    """GRPO with a calculator."""
    files = tiny.make()
    policy = Model("policy", files.model, trainable=True)
    prompt = prompts(files.chats, batch=4)
    episode = interact(
        policy, prompt, tools(add), n=4, max_turns=4, max_turn_tokens=8, max_tokens=64
    )
    score = reward(correct, episode)
    loss = clipped_policy_loss(group_advantage(episode, score))
    return Graph("calculator", train(policy, episode, loss=loss, lr=5e-3))


def main(steps: int = 12) -> Result:
    """A short run; `episode/turns` of its metrics says how many turns episodes had."""
    options = tiny.options("agent_calculator", steps=steps)
    return run(graph(), options, on_step=[tiny.show])


if __name__ == "__main__":
    main()
