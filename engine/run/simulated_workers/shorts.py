"""Memory that runs out in simulated kernels: which tasks come to nothing, and what is kept.

Owns: which task of a kernel is short, how many of its batches come first, and that updates of a
Step which are done are followed by the rest of the same Step. Does not own: what follows (the
coordinator).

All ranks of a train node that are left together are short alike; where they are not, one says so,
and the others wait. Of a replica one rank is short before it computes, and ends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from dataflow.errors import RunError
from dataflow.memory_limits import MemoryLimits, MemoryNeed
from engine.coordinator.memory_limits import find_lower
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.run.simulated_workers.faults import FaultModel

_KERNELS = ("decode", "forward", "train")
Computed = m.RunChunk | m.TrainStep | m.TrainPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Of a task. share: of its batches that come; more_updates: of a Step that are done first.
    rank: of a replica, which one it is.
    """

    share: float
    more_updates: int
    is_lost: bool
    rank: int = 0


class Shorts:
    """Of one run. faults: None where nothing goes wrong."""

    def __init__(self, plan: Plan, faults: FaultModel | None) -> None:
        self._nodes = {n.name: n for n in plan.nodes}
        self._faults = faults or FaultModel()
        self._left = self._faults.shorts
        self._drawn: dict[int, Shortage | None] = {}
        self._kept: dict[tuple[str, str], tuple[int, m.TrainStep]] = {}
        """(node, rank) -> updates of a Step that are done, and what of."""
        self.count = 0

    def find(self, task: Computed) -> Shortage | None:
        """Whether it is short; the same for all ranks."""
        if task.id not in self._drawn:
            self._drawn[task.id] = self._draw(task)
        return self._drawn[task.id]

    def _draw(self, task: Computed) -> Shortage | None:
        node = self._nodes[task.node]
        draw = random.Random(f"{self._faults.seed} {task.id}")
        is_ranked = isinstance(task, m.RunChunk) and bool(task.giver)
        may_be = node.work in _KERNELS and self._left > 0
        if not may_be or draw.random() >= self._faults.short_rate:
            return None
        limits = task.limits or MemoryLimits.of(node.layout)
        if find_lower(node.work, limits, MemoryNeed(tokens=limits.tokens)) is None:
            return None
        self._left -= 1
        self.count += 1
        if is_ranked:
            rank = draw.randrange(node.ranks)
            return Shortage(share=0.0, more_updates=0, is_lost=True, rank=rank)
        is_lost = isinstance(task, m.TrainPart) or draw.random() < self._faults.short_lost
        return Shortage(
            share=draw.choice((0.0, 0.5, 1.0)),
            more_updates=draw.choice((0, 1)),
            is_lost=is_lost and not isinstance(task, m.RunChunk),
        )

    def ends(self, chunk: m.RunChunk) -> bool:
        """Whether a rank of a replica is short of this chunk, and ends."""
        shortage = self.find(chunk)
        if shortage is None or not chunk.giver:
            return False
        # Ranks are told alike but for their names; the lead is the first of them.
        ranks = self._nodes[chunk.node].share_of(chunk.giver)
        return ranks[shortage.rank] == chunk.worker

    def say(self, task: Computed, shortage: Shortage) -> m.Short:
        """What its Worker says then."""
        updates = 0
        if isinstance(task, m.TrainStep) and not shortage.is_lost:
            at = task.node, task.worker
            updates = self._kept.get(at, (0, task))[0] + shortage.more_updates
            self._kept[at] = updates, task
        limits = task.limits or MemoryLimits.of(self._nodes[task.node].layout)
        return m.Short(
            id=task.id,
            node=task.node,
            worker=task.worker,
            limits=limits,
            need=MemoryNeed(doing="simulated", tokens=limits.tokens, updates=updates),
            error="simulated",
            is_lost=shortage.is_lost,
        )

    def require_rest(self, task: m.TrainStep) -> None:
        """Raises RunError unless a Step goes on of which updates are done."""
        updates, begun = self._kept.get((task.node, task.worker), (0, task))
        same_rows = begun.keys.rows() == task.keys.rows()
        if updates and not (begun.step == task.step and same_rows):
            raise RunError(
                f"{task.node}: {updates} updates of step {begun.step} are done at {task.worker},"
                f" which was told of step {task.step}, or of other rows"
            )

    def note_done(self, task: m.TrainStep) -> None:
        """All updates of a Step are done."""
        self._kept.pop((task.node, task.worker), None)
