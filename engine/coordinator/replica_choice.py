"""Which replica gets the next chunk of a node: of those that can take it, the one with the fewest
rows; of several, the first in the plan.

Owns: that choice, at a cost that does not grow with the replicas. Does not own: who can run a node
(course.py), how many rows each has (task_ledger.py), nor which chunk is next (chunk_queue.py).

Each node has a heap of (rows, place in the plan, Worker). An entry counts if the Worker still has
those rows, and stays on the heap when it is chosen, as its Worker is touched by what it is given.
One that cannot take a chunk is taken off until its Worker is touched: whoever makes a Worker able
again has to say so. Of a replica with several Workers the first is chosen, its lead.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping

from engine.plan.plan import PlannedNode

_Entry = tuple[int, int, str]


class Idlest:
    """rows: of each Worker, 0 where it is not named; they change under this."""

    def __init__(self, nodes: Iterable[PlannedNode], rows: Mapping[str, int]) -> None:
        self._rows = rows
        self._heaps: dict[str, list[_Entry]] = {}
        self._leads: dict[str, tuple[str, ...]] = {}
        self._nodes_of: dict[str, list[tuple[str, int]]] = {}
        """Worker -> (node, place among its replicas of the one that it is in)."""
        for node in nodes:
            self._leads[node.name] = node.leads
            self._heaps[node.name] = []
            self._fill(node.name)
            for place, worker in enumerate(node.workers):
                replica = place // node.ranks
                self._nodes_of.setdefault(worker, []).append((node.name, replica))
        self._touched: dict[str, None] = {}

    def touch(self, worker: str) -> None:
        """Its rows have changed, or it may be able to run what it could not."""
        self._touched[worker] = None

    @property
    def has_changed(self) -> bool:
        """Whether a choice may come out differently than the last time."""
        return bool(self._touched)

    def choose(self, node: str, able: Callable[[str], bool]) -> str | None:
        """The replica that is to have a chunk of this node; None where none is able to."""
        if self._touched:
            self._take_in()
        heap, rows = self._heaps[node], self._rows
        while heap:
            count, _, worker = heap[0]
            if count == rows[worker] and able(worker):
                return worker
            heapq.heappop(heap)
        return None

    def _take_in(self) -> None:
        for worker in self._touched:
            for node, place in self._nodes_of.get(worker, ()):
                leads, heap = self._leads[node], self._heaps[node]
                lead = leads[place]
                heapq.heappush(heap, (self._rows[lead], place, lead))
                if len(heap) > 2 * len(leads) + 8:
                    self._fill(node)
        self._touched.clear()

    def _fill(self, node: str) -> None:
        """An entry for each replica; most of those there are count no more."""
        entries = ((self._rows[w], place, w) for place, w in enumerate(self._leads[node]))
        self._heaps[node] = sorted(entries)
