"""What a further rank does in a rerun: its part of what the nodes of several ranks do.

Owns: which of the first rank's calls this one takes part in. Does not own: those calls (replay.py),
the process (other_ranks.py).

    the first rank              the others
    runs a chunk                take its rows
    trains a node of ranks      do so with their own rows
    loads or looks at weights   gather them, where such a node has them
    all else                    nothing
"""

from __future__ import annotations

from collections import deque

from engine.coordinator import messages as m
from engine.plan.plan import PlannedNode
from engine.record.told import RecordedTask
from engine.rerun.given_rows import take
from engine.rerun.needed import NeededTask
from engine.rerun.replay import Replay, ReplayedTask


class RankReplay(Replay):
    """Of one further rank, in step with the first one's Replay."""

    _given: dict[str, int] | None = None
    """The version that each of the first rank's modules has."""

    def _load(self, load: m.Load) -> None:
        """The first rank's Worker gathers weights once for all readers of a module, and not for one
        that shares the writer's (engine/worker/delivery.py).
        """
        given = self._given = self._given or {}
        uses = self.plan.node(load.reader).models
        module = next(u.module for u in uses if u.model == load.model and u.param != "tokenizer")
        if not load.alias and given.get(module) != load.version:
            self._gather(load.writer)
        given[module] = load.version

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
