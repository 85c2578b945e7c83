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
    slots: of the replica, which gets more while no more rows than that are under way. unit: rows
    that come and leave together.
    """

    lag: int
    after: float
    between: float
    slots: int
    unit: int = 1


def time_flow(decode: PricedDecode, rows: RowLengths, flow: StepFlow) -> float:
    """Seconds between two Steps. rows: those of one replica in each, by units."""
    under_way = 1 + flow.lag
    count = (1 + _TURNS) * under_way
    trained = _FlowingSteps(decode, rows, flow).train(count)
    return (trained[-1] - trained[under_way - 1]) / (count - under_way)


class _FlowingSteps:
    """Steps under way. Units are numbered as the replica gets them, Step by Step."""

    def __init__(self, decode: PricedDecode, rows: RowLengths, flow: StepFlow) -> None:
        self._decode, self._flow = decode, flow
        self._units: list[RowLengths] = []
        numbers = np.arange(len(rows))
        for first in range(0, len(rows), flow.unit):
            self._units.append(rows.take(numbers[first : first + flow.unit]))
        self._lets_in = deque([0.0] * (1 + flow.lag))
        """When units of the next Steps may come."""
        self._let_in = 0
        """Steps whose units have come."""
        self._unit_of_row: list[int] = []
        self._left_of_unit: list[int] = []
        """Rows that have not ended, of each unit that the replica has got."""
        self._used = 0
        """Rows that the replica has got and that have not ended."""
        self._left_of_step: list[int] = []
        self._ends: dict[int, float] = {}
        self._trained: list[float] = []

    def train(self, count: int) -> list[float]:
        """When each of so many Steps is trained."""
        while len(self._trained) < count:
            end = self._decode.next_end()
            if self._lets_in and self._lets_in[0] <= (math.inf if end is None else end):
                now = self._lets_in.popleft()
                self._left_of_step.append(len(self._units))
                self._let_in += 1
            else:
                assert end is not None  # rows are under way until all Steps have ended
                now = end
                for row in self._decode.advance(end).tolist():
                    self._end_row(self._unit_of_row[row], end)
                self._train_ended()
            self._give_units(now)
        return self._trained

    def _give_units(self, now: float) -> None:
        """Give the replica units that wait, as far as its credit goes."""
        count = len(self._units)
        while self._used <= self._flow.slots and len(self._left_of_unit) < self._let_in * count:
            number = len(self._left_of_unit)
            step, unit = divmod(number, count)
            rows = self._unit(step, unit)
            self._decode.add(rows, now)
            self._unit_of_row += [number] * len(rows)
            self._left_of_unit.append(len(rows))
            self._used += len(rows)

    def _unit(self, step: int, number: int) -> RowLengths:
        """A Step's unit, in another order in each Step."""
        count = len(self._units)
        return self._units[(number + round(step * _SHIFT * count)) % count]

    def _end_row(self, unit: int, end: float) -> None:
        self._used -= 1
        self._left_of_unit[unit] -= 1
        if self._left_of_unit[unit]:
            return
        step = unit // len(self._units)
        self._left_of_step[step] -= 1
        if not self._left_of_step[step]:
            self._ends[step] = end

    def _train_ended(self) -> None:
        """Train the Steps whose rows have ended, in their order, and let in the next ones."""
        while len(self._trained) in self._ends:
            end = self._ends.pop(len(self._trained))
            earliest = self._trained[-1] + self._flow.between if self._trained else 0.0
            self._trained.append(max(end + self._flow.after, earliest))
            self._lets_in.append(self._trained[-1])
