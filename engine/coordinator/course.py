"""The course of a run: when it moves on, and what it then begins.

    moment       waits for                                     left by
    opening      every source to open, every reader to load    SourceOpened, Loaded
    evaluate     the evaluations that are due                  Evaluated
    gather       enough finished rows for a Step               ChunkDone, Produced
    step         the nodes below the cut, then the trains      ChunkDone, Stepped
                 and the samples                               Recorded
    settle       readers that need this very version           Loaded
    checkpoint   the checkpoint on disk                        Checkpointed
    finished     nothing
    gone         nothing: the run goes back to a checkpoint

Owns: these, the version, and the parts of the coordinator, which it asks what can be done. Does not
own: what an event means (coordinator.py).

The stream region runs at all moments: prompts are admitted while the bound on outstanding prompts
allows it and every reader above the cut has the published version. With max_lag 0 they are admitted
in waves, while the run gathers and no prompt runs, so that batches never depend on timing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from engine.coordinator.admission import Admission
from engine.coordinator.blocks import Blocks
from engine.coordinator.checkpoint_schedule import CheckpointDue
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.dispatch import Dispatch
from engine.coordinator.evaluation import EvaluationRound
from engine.coordinator.recovery import Recovery
from engine.coordinator.replicas import Replicas
from engine.coordinator.settings import Restored, Settings
from engine.coordinator.sources import Sources
from engine.coordinator.task_ledger import Outstanding
from engine.coordinator.training import Training
from engine.coordinator.versions import Versions
from engine.plan.plan import Plan, PlannedNode
from engine.protocol.messages import Finish, Instruction, Release, Rollback, StepClosed

Moment = Literal[
    "opening", "evaluate", "gather", "step", "settle", "checkpoint", "finished", "gone"
]


class Course:
    """The state of a run. out: instructions, until they are taken."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.plan = plan
        self.settings = settings
        self.version = 0
        self.at: Moment = "opening"
        self.out: list[Instruction] = []
        self.outstanding = Outstanding()
        self.blocks = Blocks(weigh=any(n.chunks > 1 for n in plan.nodes))
        self.sources = Sources(plan, settings, self.blocks)
        self.recovery = Recovery(plan.workers, plan.spare)
        self.replicas = Replicas(plan, settings)
        self.versions = Versions(plan, self.outstanding)
        self.dispatch = Dispatch(plan, self.blocks, self.outstanding)
        for part in (self.recovery, self.replicas, self.versions):
            part.on_able = self.dispatch.consider
        self.outstanding.on_chunk.append(self.replicas.runs)
        self.training = Training(
            plan, self.blocks, self.dispatch, self.outstanding, self.sources.tables
        )
        self.checkpoints = CheckpointDue(settings)
        self.round: EvaluationRound | None = None
        self.unopened = {n.name for n in plan.nodes if n.work == "source"}
        self.rows_of: dict[str, int] = {}
        """Rows of each source in one pass."""
        self.evaluated: dict[str, int] = {}
        """Evaluate node -> the version at which it ran last."""
        self._evaluates = [n for n in plan.nodes if n.work == "evaluate"]
        self._closed = -1
        self._stop, self._at_once = "", False
        self._metrics: dict[str, float] = {}
        self._restored = False
        self._steps = {
            "opening": self._in_opening,
            "evaluate": self._in_evaluate,
            "gather": self._in_gather,
            "step": self._in_step,
            "settle": self._in_settle,
            "checkpoint": self._in_checkpoint,
        }

    def begin(self, restored: Restored | None) -> None:
        """Tell every reader which version to load."""
        if restored is not None:
            self.version = self.checkpoints.step = self._closed = restored.step
            self._restored = True
            done = {n.name: self.version for n in self._due(last=self.done)}  # before it was stored
            self.evaluated = done if restored.evaluated is None else dict(restored.evaluated)
            self.sources.restore(restored)
        self.out += self.versions.publish(self.version, moved=False)

    def stop(self, reason: str, *, at_once: bool) -> None:
        """Someone asks for the end."""
        self._stop, self._at_once = reason, at_once

    @property
    def over(self) -> bool:
        """Whether nothing follows any more."""
        return self.at in ("finished", "gone")

    def advance(self) -> None:
        """Move on as far as is possible without a further event."""
        moved = True
        while moved and not self.over:
            moved = False
            # When an evaluation ends, ranks may have to write files.
            evaluating = self.round is not None and self.round.under_way
            self.out += self.versions.bring(may_offer=not (self.dispatch.moved_on or evaluating))
            self.out += self.dispatch.tell(self._able)
            for admission in self.sources.admissions.values():
                self.assign(admission.table.pump(), 0)
                moved |= admission.give_back()
            moved |= self._steps[self.at]()
            for admission in self.sources.admissions.values():
                moved |= self._admit(admission)
            self.out += self.dispatch.tell(self._able)  # what has to be made again
            self._beyond()

    def _able(self, node: PlannedNode, worker: str) -> bool:
        """Whether a Worker can run chunks of a node: both it and the node's weights are there, and
        it is not leaving.
        """
        there = self.recovery.there(worker) and self.replicas.takes(worker)
        return there and not self.versions.lacks(node.name, worker)

    def _beyond(self) -> None:
        """Go back to a checkpoint if rows are asked for that nothing else can restore."""
        number = self.dispatch.beyond
        if number is not None and not self.over:
            worker = self.blocks.lost_with(number)
            self.go_back(worker, self.recovery.last_words(worker))

    def _admit(self, admission: Admission) -> bool:
        """Admit what a source's credit allows; if synchronous, only while no prompt is running."""
        table = admission.table
        if (
            self._stopping
            or self.at in ("opening", "checkpoint", "finished")
            or self.versions.behind(table.nodes)
        ):
            return False
        if admission.source.max_lag == 0 and (self.at != "gather" or table.prompts.running):
            return False
        found = admission.admit(self.version, sparing=self.recovery.spilling)
        self.assign(found, 0)
        if self.at == "gather" and not found:
            starved = admission.starved(self.version + 1, self.plan.place)
            if starved:
                self.fail(starved)
        return bool(found)

    def _in_opening(self) -> bool:
        if self.unopened or not self.versions.loaded_everywhere:
            return False
        if self._restored:
            self.at = "gather"
        else:
            self._evaluate_or_close(self._evaluates)
        return True

    def _in_evaluate(self) -> bool:
        assert self.round is not None
        self.assign(self.round.pump(), self.version)
        if self.round.fruitless:
            self.fail(self.round.fruitless)
            return False
        self.out += self.round.tell(self.recovery.there) if self.versions.offered else ()
        if not self.round.done:
            return False
        self.round.release()
        self.dispatch.abandon(lambda node: node.region == "evaluation")
        self.round = None
        self._close_step(evaluated=True)
        return True

    def _in_gather(self) -> bool:
        if self._stopping or self.done or self.sources.drained:
            return self._end()
        if self.dispatch.unended("stream"):  # the weights move on, and it could not run again
            return False
        taken = self.sources.take(self.version)
        if self.sources.drained:
            return self._end()
        if any(not len(slots) for slots in taken.values()):
            return False
        self.sources.formed()
        self.training.form(self.version + 1, taken)
        self.at = "step"
        return True

    def _in_step(self) -> bool:
        step = self.training
        self.assign(step.ready(), self.version + 1)
        self.out += step.tell(self.recovery.there)
        if not step.complete:
            return False
        assert step.run is not None
        self._metrics = self.sources.metrics(step.run.taken, self.version)
        self._metrics |= self.replicas.step_ended()
        self.recovery.step_ended()
        self.version += 1
        self.dispatch.next_step()
        self.out += self.versions.publish(self.version)
        self.at = "settle"
        return True

    def _in_settle(self) -> bool:
        if not self.versions.settled:
            return False
        self.training.retire()
        self._evaluate_or_close(self._due(last=self.done or self.sources.drained))
        return True

    def _in_checkpoint(self) -> bool:
        if self.checkpoints.wanted:
            self._tell_checkpoint()
        if self.checkpoints.step != self.version:
            return False
        self.at = "gather"
        return True

    def _due(self, *, last: bool) -> list[PlannedNode]:
        """Evaluate nodes that have to run at this version; at the last one all of them."""
        found = [n for n in self._evaluates if self.evaluated.get(n.name) != self.version]
        return [n for n in found if last or self.version % n.every == 0]

    def _evaluate_or_close(self, due: list[PlannedNode]) -> None:
        if not due:
            self._close_step()
            return
        self.round = EvaluationRound(
            self.plan, due, self.rows_of, self.version, self.blocks, self.dispatch, self.outstanding
        )
        self.at = "evaluate"
        self.assign(self.round.begin(), self.version)

    def _close_step(self, *, evaluated: bool = False) -> None:
        """Say that the Step is complete; again if an evaluation turned out to be due after that."""
        if evaluated or self.version > self._closed:
            self._closed = self.version
            self.out.append(StepClosed(step=self.version, metrics=self._metrics))
            self._metrics = {}
        if self.checkpoints.due(self.version):
            self.at = "checkpoint"
            self._tell_checkpoint()
        else:
            self.at = "gather"

    def _tell_checkpoint(self) -> None:
        """Tell it once every row that goes into it is there, and every rank is free to write."""
        if not self.versions.offered:
            return
        message = self.sources.checkpoint(self.version, self.dispatch)
        if message is not None:
            self.checkpoints.wanted, timed = False, self.checkpoints.timed
            self.out.append(replace(message, evaluated=dict(self.evaluated), timed=timed))

    def _end(self) -> bool:
        """Do what is left before the run is over, one at a time: evaluate, store, finish."""
        due = [] if self._stop else self._due(last=True)
        if due:  # only now is it known that this was the last version
            self._evaluate_or_close(due)
        elif self.checkpoints.step != self.version:
            self.checkpoints.want()
            self.at = "checkpoint"
            self._tell_checkpoint()
        else:
            error = "" if self._stop or self.done or self.version else self.sources.fruitless()
            reason = self._stop or ("all steps are done" if self.done else "the data has ended")
            self._finish(Finish(reason="failed" if error else reason, error=error))
        return True

    def fail(self, error: str) -> None:
        """End the run with an error, unless it has ended."""
        if self.at != "finished":
            self._finish(Finish(reason="failed", error=error))

    def _finish(self, message: Finish) -> None:
        """Nothing is wanted any more; chunks under way are discarded when they end."""
        self.at = "finished"
        if self.training.run is not None:
            self.training.retire()
        if self.round is not None:
            self.round.release()
        self.sources.abandon()
        self.dispatch.abandon(lambda node: True)
        self.release()
        self.out.append(message)

    @property
    def _stopping(self) -> bool:
        """Whether the run ends here because someone asked. A synchronous Step, which begins with
        its admission, is finished first: begun again, it would have other rows.
        """
        return bool(self._stop) and (self._at_once or not self.sources.begun)

    @property
    def done(self) -> bool:
        """Whether all Steps that were asked for are trained."""
        return self.settings.steps is not None and self.version >= self.settings.steps

    def assign(self, ready: Iterable[NodeChunk], step: int) -> None:
        """Have these chunks run, and tell every Worker what it can begin now."""
        added = False
        for each in ready:
            self.dispatch.add(each, step)
            added = True
        if added:
            self.out += self.dispatch.tell(self._able)

    def go_back(self, worker: str, error: str) -> None:
        """End this attempt, as only a checkpoint restores what was lost with the Worker."""
        self.at = "gone"
        self.out.append(Rollback(worker=worker, error=error))

    def undo_step(self, lost: frozenset[int]) -> None:
        """Rows in these blocks are lost: a Step that lacks some of them is formed again."""
        lacks = self.at == "step" and self.training.lacks(self.sources.late, lost)
        if lacks and self.training.undo():
            self.at = "gather"

    def release(self) -> None:
        """Release blocks that nobody needs."""
        for worker, blocks in self.blocks.drain().items():
            self.out.append(Release(worker=worker, blocks=blocks))
        for worker, block in self.versions.drain():
            self.out.append(Release(worker=worker, blocks=(block,)))
