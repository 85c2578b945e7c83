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
from engine.replay.rank_rows import receive_rows
from engine.replay.recorded_run import RecordedRun
from engine.replay.task_replay import RankSeat, Replay, ReplayedTask
from engine.run.worker.weight_delivery import brings, module_of


class RankReplay(Replay):
    """Of one further rank, in step with the first one's Replay."""

    def __init__(
        self, run: RecordedRun, needed_run: NeededRun, checkpoint: Path | None, seat: RankSeat
    ) -> None:
        super().__init__(run, needed_run, checkpoint, seat)
        self._module_versions: dict[str, int] = {}
        """The version that each of the first rank's modules has."""

    def _load(self, load: m.Load) -> None:
        """Take part where the first rank's Worker reads the pieces of a writer."""
        module = module_of(self.plan, load)
        if brings(load, self._module_versions.get(module)):
            self._gather(load.writer)
        self._module_versions[module] = load.version

    def _gather(self, writer: str) -> None:
        """Take part while the first rank reads the weights of a node."""
        if self.plan.node(writer).ranks > 1:
            # Each piece is a collective of all ranks; what it holds counts on the first alone.
            deque(self._worker.kernels[writer].pieces(), maxlen=0)

    def _replay(self, needed: NeededTask, version: int) -> ReplayedTask:
        task, node = needed.task, self.plan.node(needed.task.node)
        trains_with_others = task.kind == "train" and node.ranks > 1
        if needed.token_versions or trains_with_others:
            return super()._replay(needed, version)
        if task.kind == "chunk":
            assert self._seat.rows is not None
            self._keep_rows(task, receive_rows(self._seat.rows))
        return ReplayedTask(task=task)

    def _replay_tokens(self, node: PlannedNode, task: RecordedTask, version: int) -> ReplayedTask:
        writer = self._find_writer(node)
        if writer:
            self._gather(writer)
        return ReplayedTask(task=task)
