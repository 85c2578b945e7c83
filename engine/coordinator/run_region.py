"""What the coordinator asks of each region of a run, whichever it is.

    region        its rows belong to                  its object
    stream        prompts, by their source            sources.py
    step          the Step under way                  training.py
    evaluation    the round of evaluation under way   evaluation.py

Owns: the verbs. Does not own: which node is in which region (the plan), when rows run (course.py),
nor who runs them (dispatch.py).

A further region needs these verbs and a line in parts.py: the coordinator finds a region by its
name, and never asks which one it is.
"""

from __future__ import annotations

from typing import Protocol

from engine.coordinator.chunk import NodeChunk
from engine.plan.plan import Plan, PlannedNode
from engine.protocol.messages import Task, Tombstoned
from engine.protocol.refs import Key, Ref


class RunRegion(Protocol):
    """Where rows belong once they have come, and what their loss means."""

    def take_rows(self, chunk: NodeChunk, ref: Ref) -> int:
        """Take in rows of a chunk that have come; returns the block's number."""
        ...

    def close_chunk(self, chunk: NodeChunk) -> Key | None:
        """Note the first end of a chunk; returns a row that never came, if any."""
        ...

    def drop_group(self, node: PlannedNode, event: Tombstoned) -> str:
        """Give up the group of a row that failed. Returns why the run fails, if it now does."""
        ...

    def lose_row(self, node: PlannedNode, event: Tombstoned) -> str:
        """Lose a row that failed, which its group goes on without. Returns why the run fails, if it
        now does.
        """
        ...

    def tell_again(self, task: Task) -> None:
        """Tell a task once more that came to nothing, if it is of this region. Chunks come back by
        themselves (dispatch.py).
        """
        ...

    def reissue(self, chunk: NodeChunk) -> list[NodeChunk]:
        """Have the rows of a chunk that was given up made by others; returns those that can run
        at once.
        """
        ...

    def lose_blocks(self, blocks: frozenset[int]) -> list[NodeChunk]:
        """Do what follows where rows in these blocks are gone; returns the chunks that can run at
        once.
        """
        ...

    def abandon(self) -> None:
        """Release all rows: the run is over."""
        ...


def undroppable(plan: Plan, event: Tombstoned) -> str:
    """Why a run fails with a row that no group can be dropped for."""
    where = f"{plan.place(event.node)}: row {event.key}"
    return f"{where} failed where no group can be dropped: {event.error}"
