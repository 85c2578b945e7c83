"""Units of a generation that can begin and wait until a replica has a slot for them.

Owns: the order in which they are given. Does not own: which are ready (readiness.py), nor which
replica has room (late_binding.py).

Older cohorts come before younger ones, since the exact intake waits for the oldest; in a cohort the
heavier unit comes first, as a long row that begins last is what a Step ends with; of equal ones
that of the prompt that was admitted first, also where it is to be made once more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from engine.coordinator.chunk import NodeChunk
from engine.coordinator.prompts import RUNNING, PromptStates
from engine.plan.plan import PlannedNode


class WaitingUnit(NamedTuple):
    """One unit; of two the lesser is given first. lightness: its weight below 0. admission: the
    number of its prompt's. rows: its output rows.
    """

    cohort: int
    lightness: float
    admission: int
    unit: int
    slot: int
    rows: int


class UnitPool:
    """Of one node. sizes: output rows of the units of an input row. make_chunk: of these units.
    rows: output rows of all that wait; those of prompts that are gone may be among them.
    """

    def __init__(
        self,
        node: PlannedNode,
        prompts: PromptStates,
        sizes: Sequence[int],
        make_chunk: Callable[[list[WaitingUnit]], NodeChunk],
    ) -> None:
        self.node = node
        self.make_chunk = make_chunk
        self.rows = 0
        self._prompts = prompts
        self._sizes = sizes
        self._heap: list[WaitingUnit] = []

    def add(self, slots: Sequence[int], units: Sequence[int], weights: Sequence[float]) -> None:
        """These units can begin. weights: of each, in any unit."""
        # Plain numbers, as where events come one by one most calls are for one unit.
        cohort_of, admission_of = self._prompts.cohort.item, self._prompts.order.item
        sizes, spans = self._sizes, len(self._sizes)
        for slot, unit, weight in zip(slots, units, weights, strict=True):
            rows = sizes[unit % spans]
            self.put(WaitingUnit(cohort_of(slot), -weight, admission_of(slot), unit, slot, rows))

    def put(self, unit: WaitingUnit) -> None:
        """It waits, also once more after it was taken."""
        heapq.heappush(self._heap, unit)
        self.rows += unit.rows

    def take(self, most: int) -> list[WaitingUnit]:
        """The first units, with so many rows in all at most; those of prompts that are gone are
        dropped.
        """
        units: list[WaitingUnit] = []
        while self._heap and (self._heap[0].rows <= most or self._is_gone(self._heap[0])):
            unit = heapq.heappop(self._heap)
            self.rows -= unit.rows
            if not self._is_gone(unit):
                units.append(unit)
                most -= unit.rows
        return units

    def recall(self, slots: Collection[int]) -> list[WaitingUnit]:
        """Take the units of these prompts out."""
        recalled = [unit for unit in self._heap if unit.slot in slots]
        if recalled:
            self._heap = [unit for unit in self._heap if unit.slot not in slots]
            heapq.heapify(self._heap)
            self.rows -= sum(unit.rows for unit in recalled)
        return [unit for unit in recalled if not self._is_gone(unit)]

    def _is_gone(self, unit: WaitingUnit) -> bool:
        """Whether its prompt runs no more, or in another attempt."""
        prompts = self._prompts
        is_same = prompts.order.item(unit.slot) == unit.admission
        return not is_same or prompts.status.item(unit.slot) != RUNNING
