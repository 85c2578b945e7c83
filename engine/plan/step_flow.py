"""How long a Step takes where generation takes in rows of further Steps as its slots fall free.

Owns: some Steps one after another, as the lag lets their rows in. Does not own: when rows end
(joining_decode.py), what comes after generation (step_price.py).

The rows of a Step come once the Step `1 + lag` before it is trained, and it is trained once its
last row has ended and what comes after generation is done, one Step after another. So a long row
holds up its own Step, while rows of the next ones fill the slots.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from engine.plan.joining_decode import PricedDecode
from engine.plan.row_lengths import RowLengths

_TURNS = 4
"""Turns of 1 + lag Steps whose mean counts, after one that fills the slots."""
_SHIFT = 0.37
"""Of a Step's rows: by so many their order differs from that of the Step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlow:
    """lag: Steps that may be under way beside one. after: seconds from a Step's last row until its
    new weights are there. between: seconds between two Steps at least, whatever generation does.
    """

    lag: int
    after: float
    between: float


def time_flow(decode: PricedDecode, rows: RowLengths, flow: StepFlow) -> float:
    """Seconds between two Steps. rows: those of one replica in each."""
    under_way = 1 + flow.lag
    count = (1 + _TURNS) * under_way
    trained = _train_steps(decode, rows, flow, count)
    return (trained[-1] - trained[under_way - 1]) / (count - under_way)


def _train_steps(decode: PricedDecode, rows: RowLengths, flow: StepFlow, count: int) -> list[float]:
    """When each of so many Steps is trained."""
    trained: list[float] = []
    ends: dict[int, float] = {}
    left = [len(rows)] * count
    lets_in = deque([0.0] * (1 + flow.lag))
    """When rows of the next Steps may come."""
    step = 0
    while len(trained) < count:
        end = decode.next_end()
        if lets_in and lets_in[0] <= (math.inf if end is None else end):
            decode.add(_shift(rows, step), lets_in.popleft())
            step += 1
            continue
        assert end is not None  # rows are under way until all Steps have ended
        for row in decode.advance(end).tolist():
            step_of_row = row // len(rows)
            if step_of_row < count:
                left[step_of_row] -= 1
                if not left[step_of_row]:
                    ends[step_of_row] = end
        while len(trained) in ends:
            earliest = trained[-1] + flow.between if trained else 0.0
            trained.append(max(ends.pop(len(trained)) + flow.after, earliest))
            lets_in.append(trained[-1])
    return trained


def _shift(rows: RowLengths, step: int) -> RowLengths:
    """The rows of a Step, of the same lengths in another order."""
    first = round(step * _SHIFT * len(rows))
    return rows.take(np.roll(np.arange(len(rows)), first))
