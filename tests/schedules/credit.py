"""Rows that are bound late: no replica ever has more than its credit, none idles beside rows.

Owns: a count of rows under way of its own, made of what is told and heard. Does not own: the
credit (engine/coordinator/late_binding.py).
"""

from __future__ import annotations

from collections import Counter
from typing import get_args

from engine.coordinator.late_binding import SlotCredit, credit_rows
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.events import EventHeard, InstructionTold, RunEvent
from engine.run.simulated_workers.simulation import Simulation


class CreditWatch:
    """A subscriber that asserts that credit is never exceeded."""

    takes = (*get_args(m.Instruction), *get_args(m.Event))

    def __init__(self, plan: Plan) -> None:
        self._nodes = {n.name: n for n in plan.nodes if n.binds_late}
        self._tasks: dict[int, tuple[str, str]] = {}
        """Chunk -> its node and Worker."""
        self._owed: Counter[int] = Counter()
        """Rows of each that have neither come nor been given up."""

    def take(self, event: RunEvent) -> None:
        """See `engine.protocol.events`."""
        match event:
            case InstructionTold(instruction=m.RunChunk() as chunk) if chunk.node in self._nodes:
                self._give(chunk)
            case InstructionTold(instruction=m.Retire(workers=workers)):
                for worker in workers:
                    self._lose(worker)
            case EventHeard(event=m.WorkerLost(worker=worker)):
                self._lose(worker)
            case EventHeard(event=m.Produced(id=number, ref=ref)):
                self._owed[number] -= len(ref.keys)
            case EventHeard(event=m.Tombstoned(id=number)):
                self._owed[number] -= 1
            case EventHeard(
                event=m.ChunkDone(id=number) | m.FetchFailed(id=number) | m.Short(id=number)
            ):
                self._tasks.pop(number, None)

    def _give(self, chunk: m.RunChunk) -> None:
        node = self._nodes[chunk.node]
        self._owed[chunk.id] += len(chunk.keys.expand_spans(node.rows // node.inner, chunk.spans))
        self._tasks[chunk.id] = (chunk.node, chunk.worker)
        others = [n for n, task in self._tasks.items() if task == (chunk.node, chunk.worker)]
        rows = sum(self._owed[number] for number in others)
        assert rows <= credit_rows(node), f"{node.name}: {rows} rows at {chunk.worker}"

    def _lose(self, worker: str) -> None:
        lost = [number for number, (_, at) in self._tasks.items() if at == worker]
        for number in lost:
            del self._tasks[number]


def require_no_idle_replica(run: Simulation) -> None:
    """A replica with a free slot has been given what waits, unless something holds it."""
    coordinator = run.coordinator
    dispatch, course = coordinator._dispatch, coordinator._course
    if course.over or course.at == "opening" or dispatch._lost or dispatch._suspects:
        return
    for credit in dispatch.late.credits.values():
        waiting = [unit for unit in credit.pool._heap if not credit.pool._is_gone(unit)]
        for worker in credit.node.workers if waiting else ():
            slots = credit.node.layout.slots
            idle = credit.rows[worker] < slots and course._able(credit.node, worker)
            assert not idle, f"{credit.node.name}: {worker} idles beside {len(waiting)} units"


def require_no_credit_left_over(run: Simulation) -> None:
    """At the end no row counts as under way."""
    credits: list[SlotCredit] = [*run.coordinator._dispatch.late.credits.values()]
    for credit in credits:
        left = {worker: rows for worker, rows in credit.rows.items() if rows}
        assert not left, f"{credit.node.name}: rows count as under way for ever: {left}"
