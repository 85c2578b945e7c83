"""What a simulated replica decodes of a generation whose rows are bound late.

Owns: the chunks whose rows are under way, and when these are handed over. Does not own: when a
chunk may join (simulated_worker.py), when a row begins and ends (kernel_times.py), whether it fails
(chunks.py).

A lane begins with the first chunk and ends with its last row; meanwhile the Worker carries out
chunks of its other nodes. All rows that have ended leave once they are an eighth of the slots, and
a chunk's last ones at once; where nobody knows lengths each row leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.plan.plan import PlannedNode
from engine.plan.row_lengths import RowLengths
from engine.run.simulated_workers.chunks import ChunkRuns, RowsOfChunk
from engine.run.simulated_workers.world import RunningWorker, SharedWorld


@dataclass(slots=True, eq=False)
class _Joined:
    """A chunk in a lane. first: the lane's number of its first row. begun: when it joined. has_left
    and has_ended: boolean [rows]. end: to be called with the seconds of the lane that count as its
    own.
    """

    rows: RowsOfChunk
    first: int
    begun: float
    span: int
    end: Callable[[float], None]
    has_ended: np.ndarray
    has_left: np.ndarray

    @property
    def is_ready(self) -> np.ndarray:
        """Boolean [rows]: which have ended and not left."""
        return self.has_ended & ~self.has_left


class DecodeLane:
    """One node's in one Worker. over: called once no row is left."""

    def __init__(
        self,
        worker: RunningWorker,
        world: SharedWorld,
        chunks: ChunkRuns,
        node: PlannedNode,
        over: Callable[[], None],
    ) -> None:
        self._worker, self._world, self._chunks = worker, world, chunks
        self._node, self._over = node, over
        self._run = world.kernels.decode_run(node, worker.name)
        self._joined: list[_Joined] = []
        self._count = 0
        """Rows that ever came."""
        self._plans = 0
        """How often the next end was foreseen; what was foreseen before counts for nothing."""
        self._lost = world.cores.find_lost(worker.name)
        """What kernels of the host had lost when it began."""
        self._counted_until = self._now
        self._enough = 1
        """Rows that leave together, of all chunks."""
        world.cores.begin(worker.name, node)

    def join(self, rows: RowsOfChunk, span: int, end: Callable[[float], None]) -> None:
        """Take in the rows of a chunk. span: of its messages. end: called after the last row, with
        the seconds since it joined that no chunk before has counted.
        """
        now, count = self._now, len(rows.keys)
        lengths, weights = rows.lengths, rows.chunk.weights
        if weights is not None:
            weights = np.repeat(weights, rows.samples)
        if lengths is not None:
            self._enough = max(1, self._node.layout.slots // 8)
        no_tokens = np.zeros(count, dtype=np.int64)
        self._run.add(
            RowLengths(no_tokens, no_tokens) if lengths is None else lengths, now, weights
        )
        joined = _Joined(
            rows=rows,
            first=self._count,
            begun=now,
            span=span,
            end=end,
            has_ended=np.zeros(count, dtype=bool),
            has_left=np.zeros(count, dtype=bool),
        )
        self._joined.append(joined)
        self._count += count
        self._foresee()

    def _foresee(self) -> None:
        """Foresee the next end anew."""
        self._plans += 1
        now, end = self._now, self._run.next_end()
        seconds = 0.0 if end is None else max(0.0, end - now)
        self._world.cores.compute(self._worker, seconds, partial(self._go_on, self._plans))

    @property
    def _now(self) -> float:
        """The time, had nothing been lost since the lane began."""
        return self._world.cores.count_computed(self._worker.name, 0.0, self._lost)

    def _go_on(self, plan: int) -> None:
        if plan != self._plans:
            return
        ended = self._run.advance(self._now)
        for joined in self._joined:
            mine = ended[(ended >= joined.first) & (ended < joined.first + len(joined.has_ended))]
            joined.has_ended[mine - joined.first] = True
        ready = sum(int(joined.is_ready.sum()) for joined in self._joined)
        for joined in self._joined.copy():
            if ready >= self._enough or joined.has_ended.all():
                self._hand_over(joined)
        if self._joined:
            self._foresee()
        else:
            self._world.cores.end(self._worker.name, self._node)
            self._over()

    def _hand_over(self, joined: _Joined) -> None:
        """Hand over the rows of a chunk that have ended and are still here."""
        leaving = np.flatnonzero(joined.is_ready)
        joined.has_left[leaving] = True
        if len(leaving):
            joined.rows.produce(leaving, partial(self._version_of, joined.first), joined.span)
        if joined.has_left.all():
            self._joined.remove(joined)
            now = self._now
            seconds = now - max(joined.begun, self._counted_until)
            self._counted_until = now
            self._chunks.note_read(joined.rows.chunk, joined.begun + self._late)
            joined.end(seconds)

    def _version_of(self, first: int, row: int) -> int:
        begun = self._run.begun(first + row) + self._late
        return self._chunks.version_at(self._node.name, begun)

    @property
    def _late(self) -> float:
        """How much has been lost since the lane began."""
        return self._world.clock.now - self._now
