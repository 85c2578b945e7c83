"""mean_over: from the rewards of a generation's rows to the rows that they were made from.

Owns: the declaration. Does not own: the mean itself (kernels/mean_over.py), which descendants are
left (the coordinator's tables).
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
    """For each of `rows`, the mean reward of the rows that generations made from it; no other
    operator leads from those rows back up.

    rows: a port that the reward's rows come from: the prompt (ReMax: `mean_over(reward(fn, greedy),
    prompt)`), the rollout that a judge or a later turn reads (`mean_over(read_verdict(verdict),
    rollout)`). The result has its rows. It waits until every descendant of a row is decided.
    Descendants that a selection removed, and null rewards, are left out of the mean; if none are
    left, the row becomes a tombstone, and its prompt is dropped.
    """
    return Node(MEAN_OVER, name, inputs={"reward": reward, "rows": rows}).port()
