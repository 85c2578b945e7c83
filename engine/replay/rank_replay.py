"""What a further rank does in a rerun: its part of what the nodes of several ranks do.

Owns: which of the first rank's calls this one takes part in. Does not own: those calls
(task_replay.py), the process (other_ranks.py).

    the first rank              the others
    runs a chunk                take its rows
    trains a node of ranks      do so with their own rows
    loads or looks at weights   gather them, where such a node has them
    all else                    nothing
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from engine.keep.record.stored_assignments import RecordedTask
from engine.plan.plan import PlannedNode
from engine.protocol import messages as m
from engine.replay.needed_tasks import NeededRun, NeededTask
from engine.replay.rank_rows import take
from engine.replay.recorded_run import RecordedRun
from engine.replay.task_replay import RankSeat, Replay, ReplayedTask
from engine.run.worker.weight_delivery import brings, module_of


class RankReplay(Replay):
    """Of one further rank, in step with the first one's Replay."""

    def __init__(
        self, run: RecordedRun, what: NeededRun, checkpoint: Path | None, seat: RankSeat
    ) -> None:
        super().__init__(run, what, checkpoint, seat)
        self._given: dict[str, int] = {}
        """The version that each of the first rank's modules has."""

    def _load(self, load: m.Load) -> None:
        """Where the first rank's Worker reads the pieces of a writer."""
        module = module_of(self.plan, load)
        if brings(load, self._given.get(module)):
            self._gather(load.writer)
        self._given[module] = load.version

    def _gather(self, writer: str) -> None:
        """Take part while the first rank reads the weights of a node."""
        if self.plan.node(writer).ranks > 1:
            deque(self._worker.kernels[writer].pieces(), maxlen=0)

    def _replayed(self, needed: NeededTask, version: int) -> ReplayedTask:
        task, node = needed.task, self.plan.node(needed.task.node)
        if needed.forced or (task.kind == "train" and node.ranks > 1):
            return super()._replayed(needed, version)
        if task.kind == "chunk":
            assert self._seat.rows is not None
            self._keep(task, take(self._seat.rows))
        return ReplayedTask(task=task)

    def _looked_at(self, node: PlannedNode, task: RecordedTask, version: int) -> ReplayedTask:
        writer = self._writer_of(node)
        if writer:
            self._gather(writer)
        return ReplayedTask(task=task)
