"""Rows are given to a replica as slots there fall free: what waits stays with the coordinator.

Owns: the credit of each replica of a generation that binds late, and how much of it is used. Does
not own: the order of what waits (unit_pool.py), who can run a node (course.py), nor who is told
(dispatch.py).

A replica may have `layout.slots` rows under way, twice as many where rows leave their slots between
two turns (`PlannedNode.waits`), and `ahead` more that wait there, so that a slot never waits for a
message: an eighth of the slots, or one unit where that is more. It is given rows once so much
credit is free: then every slot is still busy, and a message brings more than one row. It gets an
equal share of what waits, at most those `ahead` rows, and then the one with the most credit has its
turn: so a few rows go to all replicas, and as rows run out shares become smaller and all replicas
end together (guided self-scheduling, Polychronopoulos and Kuck 1987).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import ceil

from engine.coordinator.chunk import NodeChunk
from engine.coordinator.replica_choice import Idlest
from engine.coordinator.task_ledger import Pending
from engine.coordinator.unit_pool import UnitPool, WaitingUnit
from engine.coordinator.units import NodeUnits
from engine.plan.plan import PlannedNode
from engine.protocol.progress import PoolProgress

_SHARE = 8
"""This part of the slots is what a replica has ahead."""

_WITH_WAITING = 2
"""So many times its slots a replica has where rows wait outside of them: full slots as long as no
more than half of the rows wait. What rows keep between turns is bounded by the kernel
(`Layout.parked`), whatever their number.
"""

Able = Callable[[PlannedNode, str], bool]


def ahead_rows(node: PlannedNode) -> int:
    """Rows that a replica has beside those in its slots; of an episode, all of its places."""
    return max(ceil(node.layout.slots / _SHARE) * node.segments, largest_unit(node))


def largest_unit(node: PlannedNode) -> int:
    """Rows of the largest unit."""
    return int(NodeUnits(node).sizes.max(initial=1))


def credit_rows(node: PlannedNode) -> int:
    """Rows that a replica may have under way."""
    live_rows = node.layout.slots
    if node.waits:
        live_rows *= _WITH_WAITING
    return live_rows * node.segments + ahead_rows(node)


class SlotCredit:
    """Of the replicas of one node. rows: under way at each."""

    def __init__(self, pool: UnitPool) -> None:
        node = pool.node
        self.pool = pool
        self.node = node
        self.rows: Counter[str] = Counter()
        self._largest = largest_unit(node)
        self._ahead = ahead_rows(node)
        self._most = credit_rows(node)
        self._idlest = Idlest((node,), self.rows)
        self._is_full = False
        """Whether the last look found no replica that is able and has room: units that come since
        then change nothing until a replica is touched.
        """

    @property
    def has_changed(self) -> bool:
        """Whether a look may find a replica for something that waits."""
        return bool(self.pool.rows) and (self._idlest.has_changed or not self._is_full)

    def use(self, worker: str, rows: int) -> None:
        """So many rows are given to a replica."""
        self.rows[worker] += rows
        self._idlest.touch(worker)

    def free(self, worker: str, rows: int) -> None:
        """So many of its rows have come, or never will."""
        self.rows[worker] -= rows
        if self._has_room(worker):
            self._idlest.touch(worker)

    def consider(self, worker: str) -> None:
        """It may be able to run what it could not."""
        self._idlest.touch(worker)

    def progress(self) -> PoolProgress:
        """What waits, and what is under way; from any thread."""
        return PoolProgress(
            waiting_rows=self.pool.rows,
            slots=self.node.layout.slots,
            credit=self._most,
            under_way={worker: self.rows[worker] for worker in self.node.leads},
        )

    def _has_room(self, worker: str) -> bool:
        return self._most - self.rows[worker] >= self._ahead

    def portions(self, able: Able) -> dict[str, list[WaitingUnit]]:
        """Which replica gets which of the units that wait; they count as under way from now on."""
        pool, node = self.pool, self.node
        self._is_full = False
        portions: dict[str, list[WaitingUnit]] = {}
        while pool.rows:
            worker = self._idlest.choose(node.name, lambda name: able(node, name))
            if worker is None or not self._has_room(worker):
                self._is_full = True
                break
            share = pool.rows // len(node.leads)
            units = pool.take(max(self._largest, min(share, self._ahead)))
            if units:
                portions.setdefault(worker, []).extend(units)
                self.use(worker, sum(unit.rows for unit in units))
        return portions


class LateBinding:
    """All nodes of a run whose rows are bound late."""

    def __init__(self, pools: Iterable[UnitPool]) -> None:
        self.credits = {pool.node.name: SlotCredit(pool) for pool in pools}
        self._of_worker: dict[str, list[SlotCredit]] = {}
        for credit in self.credits.values():
            for worker in credit.node.workers:
                self._of_worker.setdefault(worker, []).append(credit)

    @property
    def has_changed(self) -> bool:
        """Whether `bind` may find anything."""
        return any(credit.has_changed for credit in self.credits.values())

    def consider(self, worker: str) -> None:
        """It may be able to run what it could not."""
        for credit in self._of_worker.get(worker, ()):
            credit.consider(worker)

    def bind(
        self, able: Able, may_read: Callable[[frozenset[int]], bool]
    ) -> Iterator[tuple[NodeChunk, str]]:
        """Chunks, each with its replica, as far as there is room. able: as in `Dispatch.tell`.
        may_read: whether these blocks can be read now; what reads others waits on.
        """
        for credit in self.credits.values():
            if not credit.has_changed:
                continue
            for worker, units in credit.portions(able).items():
                chunk = credit.pool.make_chunk(units)
                rows = sum(unit.rows for unit in units)
                if may_read(chunk.holds):
                    chunk.owed = rows
                    yield chunk, worker
                    continue
                for unit in units:
                    credit.pool.put(unit)
                credit.free(worker, rows)

    def note_rows(self, asked: Pending, rows: int) -> None:
        """So many rows of a chunk have come, or never will."""
        chunk = asked.chunk
        if chunk is not None and chunk.owed:
            rows = min(rows, chunk.owed)
            chunk.owed -= rows
            self.credits[chunk.node.name].free(asked.task.worker, rows)

    def end(self, asked: Pending) -> None:
        """A chunk has ended, or is lost with its Worker: none of its rows is under way."""
        if asked.chunk is not None:
            self.note_rows(asked, asked.chunk.owed)

    def waiting(self) -> Iterator[str]:
        """For the watchdog, in words."""
        for name, credit in self.credits.items():
            if credit.pool.rows:
                busy = {w: n for w, n in credit.rows.items() if n}
                yield (
                    f"{name}: {credit.pool.rows} rows wait for a slot of"
                    f" {', '.join(credit.node.leads)}; rows under way: {busy}"
                )
