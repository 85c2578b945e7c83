"""A reward of your own: a plain function. Nothing else is needed.

Run: python examples/user_reward.py
Or: dataflow run examples/user_reward.py:graph --steps 12
"""

from __future__ import annotations

import tiny

from dataflow import Graph
from engine.api import Result, run
from graphs.grpo import grpo


# begin: what you add
def short_digits(completions: list[str], **kwargs: object) -> list[float]:
    """The share of digits among eight characters."""
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


# end


def graph() -> Graph:
    """GRPO with that reward."""
    files = tiny.make()
    return grpo(files.model, files.train, short_digits, n=8, batch=8, max_tokens=8, lr=5e-3)


def main(steps: int = 12) -> Result:
    """A short run."""
    return run(graph(), tiny.options("user_reward", steps=steps), on_step=[tiny.show])


if __name__ == "__main__":
    main()
