"""The coordinator: the one that decides. Pure: events in, instructions out.

    handle(event, now) -> instructions        no sockets, no clock, no tensors, no rows

Owns: the Steps of a run: what is admitted, which rows form a Step, who runs what, when
versions are published, evaluated and stored. Does not own: the loop that carries messages
(engine/run), nor any worker. The simulator drives this same object.

A run moves through these phases:

    phase        waits for                                     left by
    opening      every source to open, every reader to load    SourceOpened, Loaded
    evaluate     the evaluations that are due                  Evaluated
    gather       enough finished rows for a Step               ChunkDone, Produced
    step         the nodes below the cut, then the trains      ChunkDone, Stepped
                 and the samples                               Recorded
    settle       readers that need this very version           Loaded
    checkpoint   the checkpoint on disk                        Checkpointed
    finished     nothing
    gone         nothing: the run goes back to a checkpoint

The stream region runs through all of them: a prompt is admitted whenever the bound on outstanding
prompts allows it and no reader above the cut is behind the published version. With max_lag 0
prompts are admitted in waves, while the run gathers and nothing is on its way, so that what shares
a batch never depends on timing.

Workers die in any phase (recovery.py). Without state, one is begun anew, and what was lost with it
is made again: the same chunks where that gives the same rows (dispatch.py), other chunks or a
further attempt where the weights have moved on meanwhile (lane.py). Where only a checkpoint has
what was lost, the run goes back to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Literal

from engine.coordinator import doubtful
from engine.coordinator.admission import Admission
from engine.coordinator.blocks import Blocks
from engine.coordinator.device_turns import DeviceTurns
from engine.coordinator.dispatch import Chunk, Dispatch
from engine.coordinator.evaluation import EvaluationRound
from engine.coordinator.livelock import Livelock
from engine.coordinator.messages import (
    Checkpointed,
    ChunkDone,
    Evaluated,
    Event,
    FetchFailed,
    Finish,
    From,
    Instruction,
    Loaded,
    Offered,
    Produced,
    Recorded,
    Release,
    Respawn,
    Rollback,
    SourceOpened,
    StepClosed,
    Stepped,
    StopRequested,
    Tombstoned,
    WorkerLost,
    WorkerOpened,
)
from engine.coordinator.prompt_table import Ready
from engine.coordinator.ranks import RankGroups
from engine.coordinator.recovery import Recovery
from engine.coordinator.refs import Key
from engine.coordinator.settings import Restored, Settings
from engine.coordinator.sources import Sources
from engine.coordinator.storing import Storing
from engine.coordinator.training import Training
from engine.coordinator.versions import Versions
from engine.plan.plan import Plan, PlannedNode

Phase = Literal["opening", "evaluate", "gather", "step", "settle", "checkpoint", "finished", "gone"]


class Coordinator:
    """See the module. `start` first, then `handle` for each event; both return what is to be done,
    in order.
    """

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.plan = plan
        self.settings = settings
        self.version = 0
        self.phase: Phase = "opening"
        self._blocks = Blocks(weigh=any(n.chunks > 1 for n in plan.nodes))
        self._nodes = {n.name: n for n in plan.nodes}
        self.sources = Sources(plan, settings, self._blocks)
        self._livelock = Livelock(plan, self.sources.admissions, settings.patience)
        self._rows_of: dict[str, int] = {}
        self._unopened = {n.name for n in plan.nodes if n.work == "source"}
        self._stateful = plan.stateful
        self._recovery = Recovery(plan.workers)
        self._ranks, self._leases = RankGroups(plan), DeviceTurns(plan)
        self._ids = count()
        self._versions = Versions(plan, self._ids)
        self._dispatch = Dispatch(plan, self._blocks, self._ids)
        self._training = Training(plan, self._blocks, self._dispatch, self.sources.lanes, self._ids)
        self._round: EvaluationRound | None = None
        self._evaluated: dict[str, int] = {}
        self._closed = -1
        self.storing = Storing(settings)
        self._stop, self._at_once = "", False
        self._metrics: dict[str, float] = {}
        self._restored = False
        self._out, self._told = list[Instruction](), list[Instruction]()
        """What is said, and what ranks and leases say beside it, which comes first."""

    # --- the two entries --------------------------------------------------------------------------

    def start(self, restored: Restored | None = None) -> list[Instruction]:
        """Begin, or go on from a checkpoint. Every reader is told the version it has to have."""
        if restored is not None:
            self.version = self.storing.step = self._closed = restored.step
            self._restored = True
            known = restored.evaluated
            due = {
                n.name: self.version for n in self._due(last=self._done())
            }  # before it was stored
            self._evaluated = due if known is None else dict(known)
            self._ranks.kept(ref for rows in restored.rows.values() for ref in rows.values())
            self.sources.restore(restored)
        self._out += self._versions.publish(self.version, moved=False)
        return self._flush()

    def handle(self, event: Event | From, now: float) -> list[Instruction]:
        """Take note of one event. now: seconds, by any clock that only goes forward."""
        self.storing.passes(now)
        for each in self._recovery.in_order(event):
            self._told += self._leases.heard(each)
            heard, told = self._ranks.heard(each)
            self._told += told
            for one in heard:
                self._hear(one)
        if (vain := self._livelock.seen(now)) and self.phase == "gather":
            self._fail(vain)
        return self._flush()

    def _hear(self, event: Event) -> None:
        if self.phase == "gone":
            return
        if self.phase != "finished":
            self._note(event)
            self._advance()
        else:
            self._note_the_end(event)
        self._release()

    def _note_the_end(self, event: Event) -> None:
        """The run is over; what was under way is let go as it ends."""
        match event:
            case Produced():
                self._blocks.add(event.ref, 0)
            case ChunkDone():
                self._dispatch.done(event.id)
            case FetchFailed():
                self._dispatch.unfetched(event.id, event.peer)
            case Loaded() | Offered():
                self._out += self._versions.heard(event)
            case WorkerLost() if self._recovery.lost(event):
                self._dispatch.lost(event.worker, self._blocks.lose(event.worker))
                self._versions.lost(event.worker)

    def waiting(self) -> list[str]:
        """Who waits for whom, in words; for the watchdog and for a run that has stopped moving."""
        lines = [f"source {name}: has not opened" for name in sorted(self._unopened)]
        lines += self._versions.waiting() + self.sources.waiting()
        lines += self._training.waiting() + self._dispatch.waiting() + self._recovery.waiting()
        if self._round is not None:
            lines += self._round.waiting()
        lines += [*self._ranks.waiting(), *self._leases.waiting()]
        if self.phase == "checkpoint":
            lines.append(f"checkpoint of step {self.version}: is not on disk yet")
        return lines

    # --- events -----------------------------------------------------------------------------------

    def _note(self, event: Event) -> None:
        match event:
            case Produced():
                self._produced(event)
            case ChunkDone():
                self._chunk_done(event)
            case Tombstoned():
                self._tombstoned(event)
            case FetchFailed():
                self._unfetched(event)
            case WorkerLost():
                self._lost(event)
            case WorkerOpened() if self._recovery.opened(event):
                self._versions.opened(event.worker)
            case Stepped():
                self._training.stepped(event)
            case Loaded() | Offered():
                self._out += self._versions.heard(event)
            case Recorded():
                self._recovery.finished(self.plan.recorder)
                self._training.recorded()
            case Evaluated():
                assert self._round is not None
                self._recovery.finished(self._nodes[event.node].workers[0])
                self._round.evaluated(event.node)
                self._evaluated[event.node] = event.version
            case Checkpointed():
                self.storing.stored(event.step)
            case SourceOpened():
                self._opened(event)
            case StopRequested():
                self._stop, self._at_once = event.reason, event.at_once

    def _opened(self, event: SourceOpened) -> None:
        self._rows_of[event.node] = event.rows
        self._unopened.discard(event.node)
        if event.node in self.sources.admissions:
            self.sources.admissions[event.node].rows = event.rows
            self._out += doubtful.opened(self.plan, event.node, event.rows)

    def _produced(self, event: Produced) -> None:
        chunk = self._dispatch.find(event.id)
        if chunk is None:  # one that was given up: let its rows go
            self._blocks.add(event.ref, 0)
            return
        node = chunk.node
        if node.region == "evaluation":
            assert self._round is not None
            number = self._round.produced(node, event.ref)
        elif node.region == "step":
            assert self._training.run is not None
            number = self._training.run.produced(
                node.name, event.ref, self._dispatch.fresh(chunk, event.ref.keys)
            )
        else:
            number = self.sources.lanes[node.source].produced(node.name, event.ref)
        self._dispatch.made(chunk, number, event.ref)

    def _chunk_done(self, event: ChunkDone) -> None:
        self._recovery.finished(self._dispatch.worker_of(event.id))
        chunk, wrong = self._dispatch.done(event.id)
        if wrong:
            self._fail(wrong)
        elif chunk is not None and not chunk.closed:
            chunk.closed = True
            missing = self._missing(chunk)
            if missing is not None:
                where = self.plan.place(event.node)
                self._fail(
                    f"{where}: its kernel ended a chunk without row (position, sample, attempt)"
                    f" {missing}"
                )

    def _missing(self, chunk: Chunk) -> Key | None:
        """Close a chunk where its rows belong; returns a row that it should have made and did not."""
        if chunk.node.region == "evaluation":
            assert self._round is not None
            return self._round.closed(chunk)
        if chunk.node.region == "step":
            assert self._training.run is not None
            return self._training.run.closed(chunk.node)
        return self.sources.lanes[chunk.node.source].closed(chunk.node, chunk.keys)

    def _tombstoned(self, event: Tombstoned) -> None:
        node = self._nodes[event.node]
        if node.region != "stream":
            if event.failed or self._round is None:
                where = f"{self.plan.place(event.node)}: row {event.key}"
                self._fail(f"{where} failed where no group can be dropped: {event.error}")
            else:
                self._round.drop(node, event)
            return
        too_many = self.sources.drop(node.source, event)
        if too_many:
            self._fail(too_many)

    # --- losses -----------------------------------------------------------------------------------

    def _unfetched(self, event: FetchFailed) -> None:
        self._unissue(self._dispatch.unfetched(event.id, event.peer))
        if self._round is not None and self._round.told(event.id):
            self._round.unfetched(event)
        self._training.unfetched(event)

    def _lost(self, event: WorkerLost) -> None:
        """A worker is gone, with every row that it kept and whatever it was doing."""
        if not self._recovery.lost(event):
            return
        worker, hopeless = event.worker, self._recovery.hopeless(event.worker)
        if worker in self._stateful:
            self._go_back(worker, event.error)
            return
        if hopeless:
            self._fail(hopeless)
            return
        self._out.append(Respawn(workers=(worker,)))
        gone = self._blocks.lose(worker)
        self._versions.lost(worker)
        self._training.lost(worker)
        if self._round is not None:
            self._round.lost(worker)
        given_up = self._dispatch.lost(worker, gone)
        if (
            self.phase == "step"
            and self._training.lacks(self.sources.late, gone)
            and self._training.undo()
        ):
            self.phase = "gather"
        self._assign(self.sources.lose(gone), 0)
        self._unissue(given_up)
        self.storing.wanted = self.phase == "checkpoint"

    def _unissue(self, chunks: Iterable[Chunk]) -> None:
        """Chunks above the cut came to nothing: their rows are to be made by others."""
        for chunk in chunks:
            self._assign(self.sources.lanes[chunk.node.source].unissue(chunk.node, chunk.keys), 0)

    def _go_back(self, worker: str, error: str) -> None:
        self.phase = "gone"
        self._out.append(Rollback(worker=worker, error=error))

    # --- what follows -----------------------------------------------------------------------------

    def _advance(self) -> None:
        """Move on as far as is possible without a further event."""
        moved = True
        while moved and self.phase not in ("finished", "gone"):
            moved = False
            evaluating = (
                self._round is not None and self._round.under_way
            )  # at its end ranks may have to write files
            self._out += self._versions.bring(may_offer=not (self._dispatch.moved_on or evaluating))
            self._out += self._dispatch.tell(self._able)
            for admission in self.sources.admissions.values():
                self._assign(admission.lane.pump(), 0)
                moved |= admission.give_back()
            moved |= getattr(self, f"_in_{self.phase}")()
            for admission in self.sources.admissions.values():
                moved |= self._admit(admission)
            self._out += self._dispatch.tell(
                self._able
            )  # what has to be made again, as somebody asked for it
            self._beyond()

    def _able(self, node: PlannedNode, worker: str) -> bool:
        """Whether a worker can run chunks of a node: it is there, and so are the node's weights."""
        return self._recovery.there(worker) and not self._versions.lacks(node.name, worker)

    def _beyond(self) -> None:
        """Go back where rows are asked for that were lost, and that nothing but a checkpoint can
        bring back.
        """
        number = self._dispatch.beyond
        if number is not None and self.phase not in ("finished", "gone"):
            worker = self._blocks.lost_with(number)
            self._go_back(worker, self._recovery.last_words(worker))

    def _admit(self, admission: Admission) -> bool:
        """Admit what the credit of a source allows; in a synchronous run only while nothing of it
        is on its way.
        """
        lane = admission.lane
        if (
            self._stopping()
            or self.phase in ("opening", "checkpoint", "finished")
            or self._versions.behind(lane.nodes)
        ):
            return False
        if admission.source.max_lag == 0 and (self.phase != "gather" or lane.running):
            return False
        found = admission.admit(self.version, sparing=self._recovery.spilling)
        self._assign(found, 0)
        starved = (
            admission.starved(self.version + 1, self.plan.place)
            if self.phase == "gather" and not found
            else ""
        )
        if starved:
            self._fail(starved)
        return bool(found)

    def _in_opening(self) -> bool:
        if self._unopened or not self._versions.loaded_everywhere:
            return False
        if self._restored:
            self.phase = "gather"
        else:
            self._evaluate_or_close([n for n in self._nodes.values() if n.work == "evaluate"])
        return True

    def _in_evaluate(self) -> bool:
        assert self._round is not None
        self._assign(self._round.pump(), self.version)
        if self._round.fruitless:
            self._fail(self._round.fruitless)
            return False
        self._out += self._round.tell(self._recovery.there) if self._versions.offered else ()
        if not self._round.done:
            return False
        self._round.release()
        self._dispatch.abandon(lambda node: node.region == "evaluation")
        self._round = None
        self._close_step(evaluated=True)
        return True

    def _in_gather(self) -> bool:
        if self._stopping() or self._done() or self.sources.drained:
            return self._end()
        if self._dispatch.unmeasured(
            self.sources.waves
        ):  # the weights move on, and it could not run again
            return False
        taken = self.sources.take(self.version)
        if self.sources.drained:
            return self._end()
        if any(not len(slots) for slots in taken.values()):
            return False
        self.sources.formed()
        self._training.form(self.version + 1, taken)
        self.phase = "step"
        return True

    def _in_step(self) -> bool:
        step = self._training
        self._assign(step.ready(), self.version + 1)
        self._out += step.tell(self._recovery.there)
        if not step.complete:
            return False
        assert step.run is not None
        self._metrics = self.sources.metrics(step.run.taken, self.version)
        self.version += 1
        self._dispatch.next_step()
        self._out += self._versions.publish(self.version)
        self.phase = "settle"
        return True

    def _in_settle(self) -> bool:
        if not self._versions.settled:
            return False
        self._training.retire()
        self._evaluate_or_close(self._due(last=self._done() or self.sources.drained))
        return True

    def _in_checkpoint(self) -> bool:
        if self.storing.wanted:
            self._tell_checkpoint()
        if self.storing.step != self.version:
            return False
        self.phase = "gather"
        return True

    # --- evaluation, closing, checkpoints, the end ------------------------------------------------

    def _due(self, *, last: bool) -> list[PlannedNode]:
        """Evaluate nodes that have to run at this version; at the last one all of them."""
        found = [n for n in self._nodes.values() if n.work == "evaluate"]
        found = [n for n in found if self._evaluated.get(n.name) != self.version]
        return [n for n in found if last or self.version % n.every == 0]

    def _evaluate_or_close(self, due: list[PlannedNode]) -> None:
        if not due:
            self._close_step()
            return
        self._round = EvaluationRound(
            self.plan, due, self._rows_of, self.version, self._blocks, self._dispatch, self._ids
        )
        self.phase = "evaluate"
        self._assign(self._round.begin(), self.version)

    def _close_step(self, *, evaluated: bool = False) -> None:
        """Say that the Step is complete; once more where an evaluation turned out to be due after
        that.
        """
        if evaluated or self.version > self._closed:
            self._closed = self.version
            self._out.append(StepClosed(step=self.version, metrics=self._metrics))
            self._metrics = {}
        if self.storing.due(self.version):
            self._checkpoint()
        else:
            self.phase = "gather"

    def _checkpoint(self) -> None:
        self.phase = "checkpoint"
        self._tell_checkpoint()

    def _tell_checkpoint(self) -> None:
        """Tell it once every row that goes into it is there, and every rank is free to write."""
        message = (
            self.sources.checkpoint(self.version, self._dispatch)
            if self._versions.offered
            else None
        )
        if message is not None:
            self.storing.wanted = False
            self._out.append(
                replace(message, evaluated=dict(self._evaluated), timed=self.storing.timed)
            )

    def _end(self) -> bool:
        """Whatever is left to do before the run is over, one after another: evaluate, store,
        finish.
        """
        due = [] if self._stop else self._due(last=True)
        if (
            due
        ):  # that this was the last version is known only now: what was on its way came to nothing
            self._evaluate_or_close(due)
        elif self.storing.step != self.version:
            self.storing.want()
            self._checkpoint()
        else:
            error = "" if self._stop or self._done() or self.version else self.sources.fruitless()
            reason = self._stop or ("all steps are done" if self._done() else "the data has ended")
            self._finish(Finish(reason="failed" if error else reason, error=error))
        return True

    def _fail(self, error: str) -> None:
        if self.phase != "finished":
            self._finish(Finish(reason="failed", error=error))

    def _finish(self, message: Finish) -> None:
        """Nothing is wanted any longer; chunks under way come to nothing, and what they read goes
        when they end.
        """
        self.phase = "finished"
        if self._training.run is not None:
            self._training.retire()
        if self._round is not None:
            self._round.release()
        self.sources.abandon()
        self._dispatch.abandon(lambda node: True)
        self._release()
        self._out.append(message)

    def _stopping(self) -> bool:
        """Whether the run ends here because somebody asked. In a synchronous run a Step begins with
        its admission, and is finished first: given up and begun again, its rows would be others.
        """
        return bool(self._stop) and (self._at_once or not self.sources.begun)

    def _done(self) -> bool:
        return self.settings.steps is not None and self.version >= self.settings.steps

    # --- assignments ------------------------------------------------------------------------------

    def _assign(self, ready: Iterable[Ready], step: int) -> None:
        for each in ready:
            self._dispatch.add(each, step)
        self._out += self._dispatch.tell(self._able)

    def _release(self) -> None:
        self._out += [
            Release(worker=worker, blocks=blocks) for worker, blocks in self._blocks.drain().items()
        ]
        self._out += [
            Release(worker=worker, blocks=(block,)) for worker, block in self._versions.drain()
        ]

    def _flush(self) -> list[Instruction]:
        """What is said: to every rank of a node, and only to Workers that have their devices."""
        out = self._told + self._leases.told(self._ranks.told(self._out))
        self._told, self._out = [], []
        return out
