"""The course of a run: when it moves on, and what it then begins.

    moment       waits for                                     left by
    opening      every source to open, every reader to load    SourceOpened, Loaded
    evaluate     the evaluations that are due                  Evaluated
    gather       enough finished rows for a Step               ChunkDone, Produced
    step         the nodes below the cut, then the trains      ChunkDone, Stepped
                 and the samples                               Recorded
    settle       readers that need this very version           Loaded
    checkpoint   the checkpoint on disk; of a switch to        Checkpointed
                 another layout first the prompts that run     ChunkDone
    finished     nothing
    gone         nothing: the run goes back to a checkpoint

Owns: these, and the version. It asks the parts of the coordinator (parts.py) what can be done. Does
not own: what an event means (coordinator.py).

The stream region runs at all moments: prompts are admitted while the bound on outstanding prompts
allows it and every reader above the cut has the published version. With max_lag 0 they are admitted
in waves, while the run gathers and no prompt runs, so that batches never depend on timing; only the
source's own rows of the next wave are made while the run trains (next_wave.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from engine.coordinator.admission import Admission
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.parts import CoordinatorParts
from engine.coordinator.run_settings import Restored, Settings
from engine.plan.plan import Plan, PlannedNode
from engine.protocol.messages import (
    ChunkDone,
    Finish,
    Instruction,
    Produced,
    Relayout,
    Release,
    Rollback,
    StepClosed,
)

Moment = Literal[
    "opening", "evaluate", "gather", "step", "settle", "checkpoint", "finished", "gone"
]


class Course:
    """The state of a run. out: instructions, until they are taken."""

    def __init__(self, plan: Plan, settings: Settings, parts: CoordinatorParts) -> None:
        self._plan = plan
        self._settings = settings
        self.version = 0
        self.at: Moment = "opening"
        self.out: list[Instruction] = []
        self._blocks = parts.blocks
        self._dispatch = parts.dispatch
        self._sources = parts.sources
        self._next_rows = parts.next_rows
        self._next_wave = parts.next_wave
        self._training = parts.training
        self._evaluation = parts.evaluation
        self._versions = parts.versions
        self._recovery = parts.recovery
        self._replicas = parts.replicas
        self._checkpoints = parts.checkpoints
        self._relayouts = parts.relayouts
        self._regions = parts.regions
        training: set[str] = set()
        for node in plan.nodes:
            if node.traits.steps:
                training.update(node.workers)
        self._training_workers = dict.fromkeys(sorted(training))
        self.unopened = {n.name for n in plan.nodes if n.work == "source"}
        self._closed = -1
        self._stop, self._at_once = "", False
        self._metrics: dict[str, float] = {}
        self._restored = False
        self._continue_from = {
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
            self.version = self._checkpoints.step = self._closed = restored.step
            self._restored = True
            self._evaluation.restore(restored, last=self.is_complete)
            self._sources.restore(restored)
        self.out += self._versions.publish(self.version, moved=False)

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
            may_offer = not (self._dispatch.moved_on or self._evaluation.under_way)
            self.out += self._versions.bring(may_offer=may_offer)
            self.out += self._dispatch.tell(self._able)
            for admission in self._sources.admissions.values():
                self.assign(admission.table.pump(), 0)
                moved |= admission.give_back()
            moved |= self._continue_from[self.at]()
            for admission in self._sources.admissions.values():
                moved |= self._admit(admission)
            self.out += self._dispatch.tell(self._able)  # what has to be made again
            self._beyond()

    def _able(self, node: PlannedNode, worker: str) -> bool:
        """Whether a Worker can run chunks of a node: both it and the node's weights are there, and
        it is not leaving; and so for all ranks of a replica that it leads. One that trains first
        gives its version: rows of a later Step would hold up those that begin with it.
        """
        if node.ranks > 1:
            return all(self._is_ready(node, rank) for rank in node.share_of(worker))
        return self._is_ready(node, worker)

    def _is_ready(self, node: PlannedNode, worker: str) -> bool:
        if node.lag and worker in self._training_workers and self._is_updating:
            return False
        takes_chunks = self._recovery.there(worker) and self._replicas.takes(worker)
        return takes_chunks and not self._versions.lacks(node.name, worker)

    @property
    def _is_updating(self) -> bool:
        """Whether the Step is trained, or readers load what it has become."""
        if self.at != "step":
            return self.at == "settle"
        return self._dispatch.moved_on or self._training.parts.is_begun

    def _end_updating(self) -> None:
        """Workers that train may have chunks again."""
        for worker in self._training_workers:
            self._dispatch.consider(worker)

    def _beyond(self) -> None:
        """Go back to a checkpoint if rows are asked for that nothing else can restore."""
        number = self._dispatch.beyond
        if number is not None and not self.over:
            worker = self._blocks.lost_with(number)
            self.go_back(worker, self._recovery.last_words(worker))

    def _admit(self, admission: Admission) -> bool:
        """Admit what a source's credit allows; if synchronous, only while no prompt is running."""
        table = admission.table
        if self._stopping or self.at in ("opening", "checkpoint", "finished"):
            return False
        if self._versions.behind(table.nodes):
            return False
        # In waves, so that which prompts are in a batch never depends on timing (decision 0003).
        if admission.source.max_lag == 0 and (self.at != "gather" or table.prompts.running):
            return False
        has_aged = table.begin_with(self.version)
        chunks = admission.admit(self.version, sparing=self._recovery.spilling)
        self.assign(self._next_wave.admit(chunks), 0)
        if self.at == "gather" and not chunks:
            starved = admission.why_starved(self.version + 1, self._plan.place)
            if starved:
                self.fail(starved)
        return has_aged or bool(chunks)

    def _in_opening(self) -> bool:
        if self.unopened or not self._versions.loaded_everywhere:
            return False
        if self._restored:
            self.at = "gather"
        else:
            self._evaluate_or_close(self._evaluation.nodes)
        return True

    def _in_evaluate(self) -> bool:
        evaluation_round = self._evaluation.round
        assert evaluation_round is not None
        self.assign(evaluation_round.pump(), self.version)
        fruitless = evaluation_round.fruitless
        if fruitless:
            self.fail(fruitless)
            return False
        if self._versions.no_offer_under_way:
            self.out += evaluation_round.tell(self._recovery.there)
        if not evaluation_round.is_complete:
            return False
        self._evaluation.end()
        self._close_step(evaluated=True)
        return True

    def _in_gather(self) -> bool:
        if self._stopping or self.is_complete or self._sources.is_drained:
            return self._end()
        moved = self._work_on_parts()
        # A synchronous Step waits for the end of its chunks, not for their rows alone: what they
        # measured comes after the rows, and once the weights have moved on a chunk whose Worker
        # dies before that could not run again (decision 0024).
        if self._dispatch.has_unended("stream"):
            return moved
        taken = self._sources.take(self.version)
        if self._sources.is_drained:
            return self._end()
        if any(not len(slots) for slots in taken.values()):
            return moved
        self._sources.note_formed()
        self._training.form(self.version + 1, taken)
        self.at = "step"
        return True

    def _work_on_parts(self) -> bool:
        """Work on the parts of a streamed Step whose other rows are generated; returns whether a
        part was cut, so that nodes above the cut can run on it.
        """
        formed_parts = self._sources.cut_parts()
        self.out += formed_parts
        parts = self._training.parts
        for source, slots in self._sources.take_parts():
            parts.add(self.version + 1, source, slots)
        self.assign(parts.ready(), self.version + 1)
        self.out += parts.tell(self._recovery.there)
        return bool(formed_parts)

    def _in_step(self) -> bool:
        step = self._training
        if step.run is None:  # it was undone as rows of it are lost: its prompts form one again
            self.at = "gather"
            self._end_updating()
            return self._in_gather()
        self.assign(step.ready(), self.version + 1)
        self.out += step.tell(self._recovery.there)
        if not step.complete:
            self.out += self._next_rows.tell(self.version + 1, self._recovery.there)
            if self._dispatch.moved_on:
                self.assign(self._next_wave.begin(self.version), 0)
            return False
        self._metrics = self._sources.metrics(step.run.taken, self.version)
        self._metrics |= self._replicas.step_ended()
        self._metrics |= self._relayouts.end_step(self.version + 1)
        self._metrics |= self._dispatch.limits.take_metrics()
        self._recovery.step_ended()
        self.version += 1
        self._dispatch.next_step(but=self._next_wave.chunks)
        self.out += self._versions.publish(self.version)
        self.at = "settle"
        return True

    def _in_settle(self) -> bool:
        if not self._versions.is_settled:
            self.out += self._next_rows.tell(self.version, self._recovery.there)
            return False
        self._training.retire()
        self._next_rows.end_step(self.version)
        self._end_updating()
        last = self.is_complete or self._sources.is_drained
        self._evaluate_or_close(self._evaluation.due(self.version, last=last))
        return True

    def _in_checkpoint(self) -> bool:
        if self._checkpoints.wanted:
            self._tell_checkpoint()
        if self._checkpoints.step != self.version:
            return False
        relayout = self._relayouts.take(self.version)
        if relayout is not None and not self._stop:
            self._finish(relayout)
        else:
            self.at = "gather"
        return True

    def _evaluate_or_close(self, due: list[PlannedNode]) -> None:
        if not due:
            self._close_step()
            return
        self.at = "evaluate"
        self.assign(self._evaluation.begin(due, self.version), self.version)

    def _close_step(self, *, evaluated: bool = False) -> None:
        """Say that the Step is complete; again if an evaluation turned out to be due after that."""
        if evaluated or self.version > self._closed:
            self._closed = self.version
            self.out.append(StepClosed(step=self.version, metrics=self._metrics))
            self._metrics = {}
        is_due = self._checkpoints.due(self.version)
        if self._chooses_layout and self._relayouts.choose(self.version) and not is_due:
            self._checkpoints.want(timed=True)
            is_due = True
        if is_due:
            self.at = "checkpoint"
            self._tell_checkpoint()
        else:
            self.at = "gather"

    @property
    def _chooses_layout(self) -> bool:
        """Whether the run may go on with another layout: something is to come, and no checkpoint of
        this Step is there, from which it has just begun.
        """
        if self._stop or self.is_complete or self._sources.is_drained:
            return False
        return 0 < self.version != self._checkpoints.step

    def _tell_checkpoint(self) -> None:
        """Tell it once every row that goes into it is there, and every rank is free to write."""
        if not self._versions.no_offer_under_way:
            return
        if self._relayouts.is_draining and not self._stop:
            return
        message = self._sources.checkpoint(self.version, self._dispatch)
        if message is not None:
            self._checkpoints.wanted = False
            evaluated = dict(self._evaluation.evaluated)
            timed = self._checkpoints.timed
            self.out.append(replace(message, evaluated=evaluated, timed=timed))

    def _end(self) -> bool:
        """Do what is left before the run is over, one at a time: evaluate, store, finish."""
        # Only now is it known that this was the last version, at which all evaluations are due.
        due = self._evaluation.due(self.version, last=True)
        if due and not self._stop:
            self._evaluate_or_close(due)
        elif self._checkpoints.step != self.version:
            self._checkpoints.want()
            self.at = "checkpoint"
            self._tell_checkpoint()
        else:
            self._finish(self._how_it_ended())
        return True

    def _how_it_ended(self) -> Finish:
        if self._stop:
            return Finish(reason=self._stop)
        if self.is_complete:
            return Finish(reason="all steps are done")
        # Data that ended without a single Step is no success where prompts were given up.
        error = "" if self.version else self._sources.fruitless()
        return Finish(reason="failed" if error else "the data has ended", error=error)

    def fail(self, error: str) -> None:
        """End the run with an error, unless it has ended."""
        if self.at != "finished":
            self._finish(Finish(reason="failed", error=error))

    def _finish(self, message: Finish | Relayout) -> None:
        """Nothing is wanted any more; chunks under way are discarded when they end."""
        self.at = "finished"
        for region in self._regions.values():
            region.abandon()
        self._next_rows.abandon()
        self._dispatch.abandon(lambda node: True)
        self._drop_next_wave()
        self.release()
        self.out.append(message)

    def _drop_next_wave(self) -> None:
        """Let go of the rows of prompts that are not admitted any more."""
        for event, asked in self._next_wave.abandon():
            if isinstance(event, Produced):
                self._blocks.add(event.ref, 0)
            elif isinstance(event, ChunkDone):
                self._dispatch.finish(asked)

    @property
    def _stopping(self) -> bool:
        """Whether the run ends here because someone asked. A synchronous Step, which begins with
        its admission, is finished first: begun again, it would have other rows.
        """
        return bool(self._stop) and (self._at_once or not self._sources.has_begun)

    @property
    def is_complete(self) -> bool:
        """Whether all Steps that were asked for are trained."""
        return self._settings.steps is not None and self.version >= self._settings.steps

    def assign(self, ready: Iterable[NodeChunk], step: int) -> None:
        """Have these chunks run, and tell every Worker what it can begin now."""
        has_chunks = False
        for chunk in ready:
            self._dispatch.add(chunk, step)
            has_chunks = True
        if has_chunks:
            self.out += self._dispatch.tell(self._able)

    def go_back(self, worker: str, error: str) -> None:
        """End this attempt, as only a checkpoint restores what was lost with the Worker."""
        self.at = "gone"
        self.out.append(Rollback(worker=worker, error=error))

    def release(self) -> None:
        """Release blocks that nobody needs."""
        for worker, blocks in self._blocks.drain().items():
            self.out.append(Release(worker=worker, blocks=blocks))
        for worker, block in self._versions.drain():
            self.out.append(Release(worker=worker, blocks=(block,)))
