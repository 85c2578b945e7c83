"""concat: rows of several ports as the rows of one.

Owns: the declaration. Does not own: which rows come out (dataflow/rows.py), moving them
(kernels/concat.py).
"""

from __future__ import annotations

from typing import TypeVar

from dataflow.calls import call_error
from dataflow.node import Node, Port
from dataflow.operator import Concat, Input, Operator, declares
from dataflow.schema import Schema, common_schema

A = TypeVar("A", bound=Schema)

CONCAT = Operator(
    path="operators.concat:CONCAT",
    name="concat",
    work="host",
    rows=Concat(),
    variadic=Input(name="part", schema=Schema),
    outputs=(Schema,),
    kernels={"host": "operators.kernels.concat:ConcatRows"},
)


@declares
def concat(*parts: Port[A], name: str = "concat") -> Port[A]:
    """For each prompt the rows of the first port, then those of the second, and so on: one group.

    All ports come from one source, as two generations of the same prompts do. The second's samples
    are counted on from the first's; each row keeps its sampler's temperature, max_tokens and
    version. A concat of the same rows in the same order has the same rows: `concat(score_a,
    score_b)` goes with `concat(rollout_a, rollout_b)`. A row that a selection removed from a port
    is not here either.

    The schema is the nearest that all ports have in common: of a Rollout and a Completion a
    Completion, of a TokenReward and a Reward a Reward (a reader that would use the token's rewards
    is refused). Where nothing was truncated, the sampler's mass is 1: a Rollout beside a
    TruncatedRollout becomes one.
    """
    if len(parts) < 2:
        count = len(parts) or "none"
        raise call_error("concat", f"expected two ports or more, found {count}", "concat(a, b)")
    # What is no Port is refused where the node is made.
    schemas = [port.schema for port in parts if isinstance(port, Port)]
    schema = common_schema(schemas or [Schema])
    inputs = {f"part{i}": port for i, port in enumerate(parts)}
    return Node(CONCAT, name, inputs=inputs, schemas=(schema,)).port()
