"""An operator of your own: a decorated function on columns, inserted into GRPO without changing it.

    python examples/user_operator.py
    dataflow draw examples/user_operator.py:graph

`novelty.fn(...)` is the plain function: call it in a test with Columns.make(...).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import tiny
from user_reward import short_digits

from dataflow import Columns, Graph, Reward, Rollout, operator
from engine.api import Result, run
from graphs.grpo import grpo


# begin: what you add
@operator(scope="group")
def novelty(
    rollout: Columns[Rollout], score: Columns[Reward], *, weight: float = 0.1
) -> Columns[Reward]:
    """The reward, plus `weight` for an answer that begins like no other in its group."""
    openings = [
        (group, text[:2]) for group, text in zip(rollout.groups, rollout["completion"], strict=True)
    ]
    times = Counter(openings)
    alone = np.array([times[opening] == 1 for opening in openings], dtype=np.float32)
    return score.set(reward=score["reward"] + weight * alone)


# end


def graph(*, weight: float = 0.1) -> Graph:
    """GRPO whose advantage reads `novelty` where it read `score`."""
    files = tiny.make()
    g = grpo(files.model, files.train, short_digits, n=8, batch=8, max_tokens=8, lr=5e-3)
    shaped = novelty(g.port("rollout", Rollout), g.port("score", Reward), weight=weight)
    return g.replace(score=shaped)


def main(steps: int = 12) -> Result:
    """A short run."""
    return run(graph(), tiny.options("user_operator", steps=steps), on_step=[tiny.show])


if __name__ == "__main__":
    main()
