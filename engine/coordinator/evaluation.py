"""The evaluation region: which evaluate nodes are due, and the round of them that is under way.

Owns: the version at which each evaluate node ran last, and the round. Does not own: what a round
does (evaluation_round.py), nor when one begins (course.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.dispatch import Dispatch
from engine.coordinator.evaluation_round import EvaluationRound
from engine.coordinator.run_region import undroppable
from engine.coordinator.run_settings import Restored
from engine.coordinator.task_ledger import Outstanding
from engine.plan.plan import Plan, PlannedNode
from engine.protocol.messages import Task, Tombstoned
from engine.protocol.refs import Key, Ref


class Evaluation:
    """`round` is the one under way. evaluated: evaluate node -> the version at which it ran last.
    rows_of: rows of each source in one pass, once it has opened.
    """

    def __init__(
        self, plan: Plan, blocks: Blocks, dispatch: Dispatch, outstanding: Outstanding
    ) -> None:
        self._plan = plan
        self._blocks = blocks
        self._dispatch = dispatch
        self._outstanding = outstanding
        self.nodes = [n for n in plan.nodes if n.work == "evaluate"]
        self.rows_of: dict[str, int] = {}
        self.evaluated: dict[str, int] = {}
        self.round: EvaluationRound | None = None

    # --- when -------------------------------------------------------------------------------------

    def restore(self, restored: Restored, *, last: bool) -> None:
        """Take up what a checkpoint says. last: whether it was written after the last Step."""
        if restored.evaluated is not None:
            self.evaluated = dict(restored.evaluated)
            return
        # A checkpoint is written after the evaluations of its Step.
        due = self.due(restored.step, last=last)
        self.evaluated = {node.name: restored.step for node in due}

    def due(self, version: int, *, last: bool) -> list[PlannedNode]:
        """Evaluate nodes that have to run at this version; at the last one all of them."""
        waiting = [n for n in self.nodes if self.evaluated.get(n.name) != version]
        return [n for n in waiting if last or version % n.every == 0]

    def begin(self, due: Sequence[PlannedNode], version: int) -> list[NodeChunk]:
        """Begin a round of these nodes; returns its first chunks."""
        self.round = EvaluationRound(
            self._plan,
            due,
            self.rows_of,
            version,
            self._blocks,
            self._dispatch,
            self._outstanding,
        )
        return self.round.begin()

    def end(self) -> None:
        """End the round: every due node has its numbers."""
        assert self.round is not None
        self.round.release()
        self._dispatch.abandon(lambda node: node.region == "evaluation")
        self.round = None

    @property
    def under_way(self) -> bool:
        """Whether an evaluate node was told and has not ended."""
        return self.round is not None and self.round.under_way

    # --- the verbs of a region --------------------------------------------------------------------

    def take_rows(self, chunk: NodeChunk, ref: Ref) -> int:
        """As in RunRegion."""
        assert self.round is not None
        return self.round.add_rows(chunk.node, ref)

    def close_chunk(self, chunk: NodeChunk) -> Key | None:
        """As in RunRegion."""
        assert self.round is not None
        return self.round.close_chunk(chunk)

    def drop_group(self, node: PlannedNode, event: Tombstoned) -> str:
        """Leave the group out of the round if a node's own policy gave the row up. A failure ends
        the run.
        """
        if event.failed or self.round is None:
            return undroppable(self._plan, event)
        self.round.drop(node, event)
        return ""

    def lose_row(self, node: PlannedNode, event: Tombstoned) -> str:
        """Leave the row out of the round; the evaluate nodes say how many are."""
        if self.round is not None:
            self.round.lose_row(node, event)
        return ""

    def tell_again(self, task: Task) -> None:
        """As in RunRegion."""
        if self.round is not None:
            self.round.undone(task)

    def reissue(self, chunk: NodeChunk) -> list[NodeChunk]:
        """As in RunRegion."""
        assert self.round is not None
        return self.round.reissue(chunk)

    def lose_blocks(self, blocks: frozenset[int]) -> list[NodeChunk]:
        """Nothing follows: a round has one version, so its chunks run again whole as soon as
        somebody reads what they made (dispatch.py, decision 0009).
        """
        del blocks
        return []

    def abandon(self) -> None:
        """As in RunRegion."""
        if self.round is not None:
            self.round.release()

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        return [] if self.round is None else self.round.waiting()
