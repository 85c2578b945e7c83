"""An advantage of your own: an operator that returns Advantage, in place of GRPO's.

Run: python examples/user_advantage.py
"""

from __future__ import annotations

import numpy as np
import tiny
from user_reward import short_digits

from dataflow import Advantage, Columns, Graph, Reward, Rollout, operator
from engine.api import Result, run
from graphs.grpo import grpo


# begin: what you add
@operator(scope="group")
def rank_advantage(rollout: Columns[Rollout], score: Columns[Reward]) -> Columns[Advantage]:
    """The share of its group that an answer beats, minus the share that beats it."""
    mask, group, reward = rollout["completion_mask"], rollout.groups, score["reward"]
    same = group[:, None] == group[None, :]
    beats = np.sign(reward[:, None] - reward[None, :]) * same
    value = beats.sum(axis=1) / same.sum(axis=1)
    tokens = np.repeat(value, mask.lengths) * mask.values
    return Columns.make(Advantage, like=rollout, advantage=mask.like(tokens.astype(np.float32)))


# end


def graph() -> Graph:
    """GRPO with ranks in place of standardised rewards."""
    files = tiny.make()
    g = grpo(files.model, files.train, short_digits, n=8, batch=8, max_tokens=8, lr=5e-3)
    ranks = rank_advantage(g.port("rollout", Rollout), g.port("score", Reward))
    return g.replace(advantage=ranks)


def main(steps: int = 12) -> Result:
    """A short run."""
    return run(graph(), tiny.options("user_advantage", steps=steps), on_step=[tiny.show])


if __name__ == "__main__":
    main()
