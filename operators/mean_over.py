"""mean_over: a reward goes up to the rows that its own were made from.

Owns: the declaration. Does not own: the mean itself (kernels/mean_over.py), nor which descendants
are left (the coordinator's tables).
"""

from __future__ import annotations

from typing import Any

from dataflow.node import Node, Port
from dataflow.operator import Input, Operator, Reduce, declares
from dataflow.schema import Reward, Schema

MEAN_OVER = Operator(
    path="operators.mean_over:MEAN_OVER",
    name="mean_over",
    work="host",
    rows=Reduce(of="reward", to="rows"),
    inputs=(
        Input(name="reward", schema=Reward, columns=("reward",)),
        Input(name="rows", schema=Schema, columns=()),
    ),
    outputs=(Reward,),
    kernels={"host": "operators.kernels.mean_over:MeanOver"},
)


@declares
def mean_over(reward: Port[Reward], rows: Port[Any], *, name: str = "mean_over") -> Port[Reward]:
    """For each of `rows`, the mean reward of what generations made of it; the only way up from a
    generation's rows.

    rows: a port that the reward's rows come from: the prompt (ReMax: `mean_over(reward(fn, greedy),
    prompt)`), the rollout that a judge or a later turn reads (`mean_over(read_verdict(verdict),
    rollout)`). The result stands on its rows. It waits until every descendant of a row is decided.
    Those that a selection took away, and rewards that are null, are left out of the mean; where
    none is left the row is a tombstone, so its prompt is dropped.
    """
    return Node(MEAN_OVER, name, inputs={"reward": reward, "rows": rows}).port()
