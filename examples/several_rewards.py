"""Several rewards: weights, None for "does not apply to this row", an async one, one that logs.

    python examples/several_rewards.py

Each function runs in its own process with a time limit, and is logged by its name. If a function
returns None, its weight does not count for that row; a row for which all return None is an error
(or a dropped group: on_error=).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import tiny

from dataflow import Graph, Model
from engine.api import Result, run
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train


def digits(
    completions: list[str], log_metric: Callable[[str, float], None], **kwargs: object
) -> list[float]:
    """The share of digits; logs how many answers are empty."""
    log_metric("empty", sum(not text for text in completions) / len(completions))
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def even_answer(completions: list[str], answer: list[str], **kwargs: object) -> list[float | None]:
    """Judges only prompts with an even answer: is the last character an even digit?"""
    return [
        None if int(right) % 2 else float(text[-1:] in ("0", "2", "4", "6", "8"))
        for text, right in zip(completions, answer, strict=True)
    ]


async def remote_judge(completions: list[str], **kwargs: object) -> list[float]:
    """Like a call of a service: all rows of a chunk at once."""

    async def judge(text: str) -> float:
        await asyncio.sleep(0)  # the request would be here
        return 1.0 if " " not in text else 0.0

    return list(await asyncio.gather(*map(judge, completions)))


def graph() -> Graph:
    """GRPO on their weighted sum."""
    files = tiny.make()
    policy = Model("policy", files.model, trainable=True)
    rollout = generate(policy, prompts(files.train, batch=8), n=8, max_tokens=6)
    score = reward(
        [digits, even_answer, remote_judge], rollout, weights=[1.0, 0.5, 0.2], timeout=10.0
    )
    advantage = group_advantage(rollout, score)
    return Graph(
        "several_rewards", train(policy, rollout, loss=clipped_policy_loss(advantage), lr=5e-3)
    )


def main(steps: int = 12) -> Result:
    """A short run."""
    return run(graph(), tiny.options("several_rewards", steps=steps), on_step=[tiny.show])


if __name__ == "__main__":
    main()
