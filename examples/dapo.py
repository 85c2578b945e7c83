"""DAPO (arXiv:2503.14476): groups without signal are replaced, long answers are penalised, and the
clip range is wider above.

    python examples/dapo.py
    dataflow draw examples/dapo.py:graph

Only `select` removes rows. With refill=True another prompt takes the place of a removed one, so
that each Step has its full batch.
"""

from __future__ import annotations

import tiny

from dataflow import Graph, Model
from engine.api import Result, run
from operators.advantage import group_advantage, overlong_penalty
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.select import mixed_groups, select
from operators.train import train


def has_seven(completions: list[str], **kwargs: object) -> list[float]:
    """1.0 if there is a 7: rare at first, so that many groups have no signal."""
    return [float("7" in text) for text in completions]


def graph(*, batch: int = 8, max_tokens: int = 8, lr: float = 5e-3) -> Graph:
    """DAPO.

    Args:
        batch: prompts per Step, after the selection.
        max_tokens: longest answer; its last quarter is penalised.
        lr: learning rate.
    """
    files = tiny.make()
    policy = Model("policy", files.model, trainable=True)
    rollout = generate(policy, prompts(files.train, batch=batch), n=8, max_tokens=max_tokens)
    score = reward(has_seven, rollout)
    rollout, score = select(rollout, score, where=mixed_groups(score), refill=True)
    shaped = overlong_penalty(
        rollout, score, max_tokens=max_tokens, buffer=max_tokens // 4, factor=0.1
    )
    objective = clipped_policy_loss(group_advantage(rollout, shaped), clip=(0.2, 0.28))
    return Graph("dapo", train(policy, rollout, loss=objective, lr=lr, minibatches=2))


def main(steps: int = 8) -> Result:
    """A short run."""
    return run(graph(), tiny.options("dapo", steps=steps), on_step=[tiny.show])


if __name__ == "__main__":
    main()
