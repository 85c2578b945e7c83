"""Chunks under way: who runs which, and the blocks that they read.

Owns: the choice of a replica, and keeping what a chunk reads until it has ended. Does not
own: which rows make a chunk (lane.py, step.py), nor what becomes of its output (core.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dataflow.batch import Keys
from engine.coordinator.lane import Ready
from engine.coordinator.messages import RunChunk
from engine.coordinator.tables import Blocks
from engine.plan.plan import PlannedNode


@dataclass(frozen=True, slots=True, eq=False)
class UnderWay:
    """A chunk that a worker has. holds: the numbers of the blocks that it reads."""

    node: PlannedNode
    keys: Keys
    worker: str
    holds: frozenset[int]


class Dispatch:
    """Every chunk that was assigned and has not ended."""

    def __init__(self, workers: Iterable[str], blocks: Blocks) -> None:
        self._blocks = blocks
        self._rows_at = dict.fromkeys(workers, 0)
        """Rows under way at each worker."""
        self._chunks: dict[int, UnderWay] = {}
        self._next = 0

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def assign(self, ready: Ready, step: int) -> RunChunk:
        """Give a chunk to the replica with the fewest rows under way."""
        node, number = ready.node, self._next
        worker = min(node.workers, key=self._rows_at.__getitem__)
        self._next += 1
        self._rows_at[worker] += len(ready.keys)
        self._blocks.hold(ready.holds)
        self._chunks[number] = UnderWay(node, ready.keys, worker, ready.holds)
        return RunChunk(id=number, node=node.name, worker=worker, step=step, keys=ready.keys, inputs=ready.inputs)

    def done(self, chunk: int) -> UnderWay | None:
        """A chunk has ended: what it read may go. None where it had ended before."""
        found = self._chunks.pop(chunk, None)
        if found is not None:
            self._rows_at[found.worker] -= len(found.keys)
            self._blocks.let_go(found.holds)
        return found
