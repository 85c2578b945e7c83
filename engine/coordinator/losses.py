"""What is lost with a Worker, and what follows for its rows, its tasks and its place.

    a Worker ends            what follows
    with state               Rollback: only a checkpoint has what it had
    as a replica that left   nobody takes its place
    again and again          a replica that can be done without is given up, else the run fails
    as a rank of a replica   the others of the replica end, too; Respawn of all of them
    in any other way         Respawn, with its next epoch

    memory runs out          what follows
    and all is kept          lower limits, and the task again
    and state is lost        the same, from the last checkpoint
    of a rank of a replica   the same, once it has ended
    and nothing is left      the run fails

Owns: that order, also where a replica ends on purpose. Does not own: who is alive (recovery.py),
how many replicas there are (replicas.py), nor how a region makes its rows again (run_region.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.coordinator.chunk import NodeChunk
from engine.coordinator.course import Course
from engine.coordinator.parts import CoordinatorParts
from engine.coordinator.ranks import RankGroups
from engine.coordinator.run_warnings import warn_of_given_up
from engine.coordinator.task_ledger import Pending
from engine.plan.plan import Plan
from engine.protocol import messages as m


class Losses:
    """Workers that end, and tasks that come to nothing. owed: what the Worker that was lost last
    had not answered.
    """

    def __init__(
        self, plan: Plan, parts: CoordinatorParts, course: Course, ranks: RankGroups
    ) -> None:
        self._plan = plan
        self._course = course
        self._ranks = ranks
        self._outstanding = parts.outstanding
        self._blocks = parts.blocks
        self._dispatch = parts.dispatch
        self._versions = parts.versions
        self._recovery = parts.recovery
        self._training = parts.training
        self._replicas = parts.replicas
        self._checkpoints = parts.checkpoints
        self._relayouts = parts.relayouts
        self._regions = parts.regions
        self.owed: list[Pending] = []
        self._mates: dict[str, tuple[str, ...]] = {}
        """Worker -> the others of its replica."""
        for node in ranks.replicas.nodes.values():
            for worker in node.workers:
                others = (mate for mate in node.share_of(worker) if mate != worker)
                self._mates[worker] = tuple(others)

    # --- Workers ----------------------------------------------------------------------------------

    def lose_worker(self, event: m.WorkerLost) -> None:
        """Do what follows where a Worker is gone, with all rows that it kept and all that it was
        doing.
        """
        worker, hopeless = event.worker, self._recovery.hopeless(event.worker)
        mates = self._mates.get(worker, ())
        if worker in self._plan.stateful:
            self._course.go_back(worker, event.error)
            return
        if self._replicas.note_lost(worker):
            self._recovery.stay_away(worker)
            self._lose((worker,), self.owed)
            return
        most = self._replicas.give_up(worker) if hopeless else None
        if most is not None:
            self._course.out.append(warn_of_given_up(self._plan, worker, hopeless, most))
            self._recovery.stay_away(worker)
            self._lose((worker,), self.owed)
            return
        if hopeless:
            self._course.fail(hopeless)
            return
        owed = [*self.owed]
        if mates:
            owed += self._end_mates(mates)
        self._course.out.append(m.Respawn(workers=(worker, *mates)))
        self._lose((worker, *mates), list({asked.task.id: asked for asked in owed}.values()))

    def _end_mates(self, mates: tuple[str, ...]) -> list[Pending]:
        """End the other ranks of a replica, which wait for one that is gone; they begin again with
        it. Returns what they had not answered.
        """
        owed: list[Pending] = []
        for mate in mates:
            owed += self._outstanding.forget_worker(mate)
            self._ranks.forget_worker(mate)
            self._recovery.retire(mate)
            self._recovery.begin(mate)
        self._course.out.append(m.Retire(workers=mates))
        return owed

    def lose_at_the_end(self, worker: str) -> None:
        """Note that a Worker is gone where nobody needs its rows any more."""
        lost_blocks = self._blocks.lose(worker)
        self._dispatch.lose((worker,), self.owed, lost_blocks)
        self._versions.forget_worker(worker)

    def move_replicas(self) -> None:
        """Have replicas end and begin as is wanted now."""
        ended, begun = self._replicas.moves(self._outstanding.owes, self._blocks.any_at)
        for worker in ended:
            owed = self._outstanding.forget_worker(worker)
            self._ranks.forget_worker(worker)
            self._recovery.retire(worker)
            self._course.out.append(m.Retire(workers=(worker,)))
            self._lose((worker,), owed)
        for worker in begun:
            self._recovery.begin(worker)
        if begun:
            self._course.out.append(m.Respawn(workers=tuple(begun)))

    def leave(self, workers: Iterable[str], now: float) -> None:
        """Have these Workers end soon, as their machines are taken away. With one that has state
        the run will go back: a checkpoint is written first, so that it is not far.
        """
        stay = self._replicas.leave(workers, now)
        self._checkpoints.asked |= not self._plan.stateful.isdisjoint(stay)

    def _lose(self, workers: tuple[str, ...], owed: list[Pending]) -> None:
        """Have what Workers without state had and did made or done again, where it is needed."""
        lost_blocks = frozenset[int]()
        for worker in workers:
            lost_blocks |= self._blocks.lose(worker)
            self._versions.forget_worker(worker)
        for asked in owed:
            self._undo(asked)
        # First, so that chunks that run again come before those that a region begins anew.
        given_up = self._dispatch.lose(workers, owed, lost_blocks)
        for region in self._regions.values():
            self._course.assign(region.lose_blocks(lost_blocks), 0)
        self._reissue(given_up)
        # Rows of the checkpoint that is to be written may be among the lost: it is told once more.
        self._checkpoints.wanted = self._course.at == "checkpoint"

    # --- tasks ------------------------------------------------------------------------------------

    def tell_unfetched_again(self, event: m.FetchFailed, asked: Pending) -> None:
        """Have a task done later whose Worker could not read its rows."""
        self._dispatch.suspect(event.peer, asked.reads)
        self._reissue(self._dispatch.take_back(asked))
        self._undo(asked)

    def begin_again_with_less(self, event: m.Short, asked: Pending) -> None:
        """A kernel's memory ran out: lower its node's limits, and have the task done again. Where
        its Worker has lost what it had, that is a loss as any other. Ends the run if nothing is
        left to lower.
        """
        self._relayouts.note_short(event.node)
        lowered = self._dispatch.limits.lower(event)
        if isinstance(lowered, str):
            if asked.wanted:
                self._course.fail(lowered)
                return
        elif lowered is not None:
            self._course.out.append(lowered)
        chunk = asked.chunk
        if chunk is not None:
            chunk.limits, chunk.was_short = self._dispatch.limits.of(event.node), True
        if event.is_lost and chunk is None:
            self._course.go_back(event.worker, event.error)
        elif event.is_lost:
            self._recovery.excuse(event.worker)
        else:
            self._training.note_kept_updates(event.need.updates)
            self._reissue(self._dispatch.take_back(asked))
            self._undo(asked)

    def _undo(self, asked: Pending) -> None:
        """A task came to nothing: its region tells it again."""
        for region in self._regions.values():
            region.tell_again(asked.task)

    def _reissue(self, chunks: Iterable[NodeChunk]) -> None:
        """Chunks were given up: others make their rows."""
        for chunk in chunks:
            region = self._regions[chunk.node.region]
            self._course.assign(region.reissue(chunk), 0)
