"""The coordinator: the one that decides. Pure: events in, instructions out.

    handle(event, now) -> instructions        no sockets, no clock, no tensors, no rows

Owns: the Steps of a run: what is admitted, which rows form a Step, who runs what, when
versions are published, evaluated and stored. Does not own: the loop that carries messages
(engine/runtime), nor any worker. The simulator drives this same object.

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

The stream region runs through all of them: a prompt is admitted whenever the bound on outstanding prompts allows it
and no reader above the cut is behind the published version. With max_lag 0 prompts are admitted in waves, while the
run gathers and nothing is on its way, so that what shares a batch never depends on timing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.admission import Admission
from engine.coordinator.dispatch import Dispatch, UnderWay
from engine.coordinator.evaluation import EvaluationRound
from engine.coordinator.fence import Fence
from engine.coordinator.lane import FINISHED, Lane, Ready
from engine.coordinator.leases import Leases
from engine.coordinator.messages import (
    Checkpoint,
    Checkpointed,
    ChunkDone,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    From,
    Gather,
    Instruction,
    Key,
    Loaded,
    Offered,
    Produced,
    Record,
    Recorded,
    Ref,
    Release,
    SourceCut,
    SourceOpened,
    StepClosed,
    Stepped,
    StopRequested,
    Tombstoned,
    TrainStep,
)
from engine.coordinator.ranks import Ranks
from engine.coordinator.step import StepRun
from engine.coordinator.tables import Blocks
from engine.coordinator.versions import Versions
from engine.plan.plan import Plan, PlannedNode, PlannedSource

Phase = Literal["opening", "evaluate", "gather", "step", "settle", "checkpoint", "finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long a run is. steps None: one pass over each training source. checkpoint_every 0: at the end only.

    error_budget: the share of admitted prompts that may be dropped (never less than 10 prompts).
    """

    steps: int | None = None
    checkpoint_every: int = 0
    error_budget: float = 0.1
    last_batch: Literal["train", "drop"] = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a checkpoint says: the Step, each source's cut, and the rows of finished prompts by source and node."""

    step: int
    sources: Mapping[str, SourceCut]
    rows: Mapping[str, Mapping[str, Ref]] = field(default_factory=dict)


class Coordinator:
    """See the module. `start` first, then `handle` for each event; both return what is to be done, in order."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.plan = plan
        self.settings = settings
        self.version = 0
        self.phase: Phase = "opening"
        self._blocks = Blocks()
        self._nodes = {n.name: n for n in plan.nodes}
        self._step_nodes = [n for n in plan.nodes if n.region == "step"]
        self._lanes = {s.name: self._lane(s) for s in plan.sources}
        self._admissions = {
            s.name: Admission(s, self._lanes[s.name], steps=settings.steps, last_batch=settings.last_batch)
            for s in plan.sources
        }
        self._rows_of: dict[str, int] = {}
        self._unopened = {n.name for n in plan.nodes if n.work == "source"}
        self._versions = Versions(plan)
        self._fences: dict[str, Fence[Event]] = {}
        self._ranks, self._leases = Ranks(plan), Leases(plan)
        self._dispatch = Dispatch(plan.workers, self._blocks)
        self._sequence = 0
        self._run: StepRun | None = None
        self._training = False
        self._told_record = False
        self._recorded = False
        self._round: EvaluationRound | None = None
        self._evaluated: dict[str, int] = {}
        self._closed = -1
        self._stored = 0
        self._first_dropped = ""
        self._stop = ""
        self._at_once = False
        self._metrics: dict[str, float] = {}
        self._restored = False
        self._out: list[Instruction] = []
        self._told: list[Instruction] = []
        """What ranks and leases say beside it, which comes first."""

    # --- the two entries ----------------------------------------------------------------------------------------

    def start(self, restored: Restored | None = None) -> list[Instruction]:
        """Begin, or go on from a checkpoint. Every reader is told the version it has to have."""
        if restored is not None:
            self.version = self._stored = self._closed = restored.step
            self._restored = True
            self._evaluated = {n.name: self.version for n in self._due(last=self._done())}  # before it was stored
            self._ranks.kept(ref for rows in restored.rows.values() for ref in rows.values())
            for name, cut in restored.sources.items():
                self._admissions[name].restore(cut, dict(restored.rows.get(name, {})), self.version)
        self._out += self._versions.publish(self.version, moved=False)
        return self._flush()

    def handle(self, event: Event | From, now: float) -> list[Instruction]:
        """Take note of one event. `now` (seconds, any clock) is carried for policies that will need it."""
        del now
        for each in self._in_order(event):
            self._told += self._leases.heard(each)
            heard, told = self._ranks.heard(each)
            self._told += told
            for one in heard:
                self._hear(one)
        return self._flush()

    def _in_order(self, event: Event | From) -> list[Event]:
        """What counts, now that this has come: a Worker in another process may repeat itself, or overtake itself."""
        if not isinstance(event, From):
            return [event]
        fence = self._fences.setdefault(event.worker, Fence())
        return fence.take(event.epoch, event.number, event.event)

    def _hear(self, event: Event) -> None:
        if self.phase != "finished":
            self._note(event)
            self._advance()
        elif isinstance(event, Produced):  # of a chunk that was still under way
            self._blocks.add(event.ref, 0)
        elif isinstance(event, ChunkDone):
            self._dispatch.done(event.chunk)
        elif isinstance(event, (Loaded, Offered)):
            self._load(event)
        self._release()

    def waiting(self) -> list[str]:
        """Who waits for whom, in words; for the watchdog and for a run that has stopped moving."""
        lines = [f"source {name}: has not opened" for name in sorted(self._unopened)]
        lines += self._versions.waiting()
        for name, lane in self._lanes.items():
            lines += lane.waiting()
            done = lane.count[FINISHED]
            lines.append(f"intake of {name}: {done} of {self._admissions[name].source.batch} prompts are finished")
        if self._run is not None:
            lines += self._run.waiting()
            lines += [] if self._recorded else [f"step {self._run.step}: its samples are not written yet"]
        if self._round is not None:
            lines += self._round.waiting()
        lines += [*self._ranks.waiting(), *self._leases.waiting()]
        if self.phase == "checkpoint":
            lines.append(f"checkpoint of step {self.version}: is not on disk yet")
        return lines

    # --- events -------------------------------------------------------------------------------------------------

    def _note(self, event: Event) -> None:
        match event:
            case Produced():
                self._produced(event)
            case ChunkDone():
                self._chunk_done(event)
            case Tombstoned():
                self._tombstoned(event)
            case Stepped():
                assert self._run is not None
                self._run.trained()
                self._training = False
            case Loaded() | Offered():
                self._load(event)
            case Recorded():
                self._recorded = True
            case Evaluated():
                assert self._round is not None
                self._round.evaluated(event.node)
                self._evaluated[event.node] = event.version
            case Checkpointed():
                self._stored = event.step
            case SourceOpened():
                self._opened(event)
            case StopRequested():
                self._stop, self._at_once = event.reason, event.at_once

    def _load(self, event: Loaded | Offered) -> None:
        if isinstance(event, Loaded):
            self._versions.loaded(event)
        else:
            self._out += self._versions.offered(event)

    def _opened(self, event: SourceOpened) -> None:
        self._rows_of[event.node] = event.rows
        self._unopened.discard(event.node)
        if event.node in self._admissions:
            self._admissions[event.node].rows = event.rows

    def _produced(self, event: Produced) -> None:
        node = self._nodes[event.node]
        if event.chunk not in self._dispatch:  # of a chunk that was given up: let its rows go
            self._blocks.add(event.ref, 0)
        elif node.region == "evaluation":
            assert self._round is not None
            self._round.produced(node, event.ref)
        elif node.region == "step":
            assert self._run is not None
            self._run.produced(event.node, event.ref)
        else:
            self._lanes[node.source].produced(event.node, event.ref)

    def _chunk_done(self, event: ChunkDone) -> None:
        chunk = self._dispatch.done(event.chunk)
        missing = self._missing(chunk) if chunk is not None else None
        if missing is not None:
            self._fail(f"{event.node}: its kernel ended a chunk without row (position, sample, attempt) {missing}")

    def _missing(self, chunk: UnderWay) -> Key | None:
        """Close a chunk where its rows belong; returns a row that it should have made and did not."""
        if chunk.node.region == "evaluation":
            assert self._round is not None
            return self._round.closed(chunk.node, chunk.keys)
        if chunk.node.region == "step":
            assert self._run is not None
            return self._run.closed(chunk.node)
        return self._lanes[chunk.node.source].closed(chunk.node, chunk.keys)

    def _tombstoned(self, event: Tombstoned) -> None:
        node = self._nodes[event.node]
        if node.region != "stream":
            self._fail(f"{event.node}: row {event.key} failed where no group can be dropped: {event.error}")
        elif self._lanes[node.source].drop(event.node, event.key[0], event.key[2]):
            self._admissions[node.source].dropped += 1
            self._first_dropped = self._first_dropped or f"{event.node} row {event.key}: {event.error}"
            dropped, admitted = self._dropped(), self._admitted()
            if dropped > max(10, self.settings.error_budget * admitted):
                spent = f"{dropped} of {admitted} admitted prompts were dropped, more than the error budget"
                self._fail(f"{spent} of {self.settings.error_budget:.0%}; the first: {self._first_dropped}")

    # --- what follows -------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Move on as far as is possible without a further event."""
        moved = True
        while moved and self.phase != "finished":
            moved = False
            for name, lane in self._lanes.items():
                self._assign(lane.pump(), 0)
                moved |= self._admissions[name].give_back()
            moved |= getattr(self, f"_in_{self.phase}")()
            for admission in self._admissions.values():
                moved |= self._admit(admission)

    def _admit(self, admission: Admission) -> bool:
        """Admit what the credit of a source allows; in a synchronous run only while nothing of it is on its way."""
        lane = admission.lane
        if self._stopping() or self.phase in ("opening", "checkpoint", "finished") or self._versions.behind(lane.nodes):
            return False
        if admission.source.max_lag == 0 and (self.phase != "gather" or lane.running):
            return False
        found = admission.admit(self.version)
        self._assign(found, 0)
        starved = admission.starved(self.version + 1) if self.phase == "gather" and not found else ""
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
        for node, keys, inputs in self._round.complete():
            message = Evaluate(node=node.name, worker=node.workers[0], version=self.version, keys=keys, inputs=inputs)
            self._out.append(message)
        if not self._round.done:
            return False
        self._round.release()
        self._round = None
        self._close_step(evaluated=True)
        return True

    def _in_gather(self) -> bool:
        if self._stopping() or self._done() or self._drained():
            return self._end()
        taken = {name: admission.take(self.version) for name, admission in self._admissions.items()}
        if self._drained():
            return self._end()
        if any(not len(slots) for slots in taken.values()):
            return False
        for name, slots in taken.items():
            self._admissions[name].taken(slots)
        self._run = StepRun(self.version + 1, self._step_nodes, self._lanes, taken, self._blocks)
        self._told_record = self._recorded = not self.plan.recorded
        self.phase = "step"
        return True

    def _in_step(self) -> bool:
        run = self._run
        assert run is not None
        self._assign(run.ready(), run.step)
        if run.settled and not self._told_record:
            self._record(run)
        node = None if self._training else run.next_train()
        if node is not None:
            return self._train(run, node)
        if not run.complete or not self._recorded:
            return False
        self._measure(run)
        self.version = run.step
        self._out += self._versions.publish(self.version)
        self.phase = "settle"
        return True

    def _train(self, run: StepRun, node: PlannedNode) -> bool:
        """Let the node whose turn it is train; returns whether its turn is over, having no row."""
        keys = run.keys(node.inputs)
        if not len(keys):
            run.trained()
            return True
        self._training = True
        self._sequence += 1
        message = TrainStep(
            sequence=self._sequence,
            node=node.name,
            worker=node.workers[0],
            step=run.step,
            keys=keys,
            inputs=run.inputs(node.inputs, keys),
        )
        self._out.append(message)
        return False

    def _record(self, run: StepRun) -> None:
        """Let the samples be written while the Step is trained."""
        self._told_record = True
        keys = run.keys(self.plan.recorded)
        inputs = run.inputs(self.plan.recorded, keys)
        self._out.append(Record(step=run.step, keys=keys, inputs=inputs, worker=self.plan.recorder))

    def _in_settle(self) -> bool:
        if not self._versions.settled:
            return False
        assert self._run is not None
        for name, slots in self._run.taken.items():
            self._lanes[name].retire(slots)
        self._run.release()
        self._run = None
        self._evaluate_or_close(self._due(last=self._done() or self._drained()))
        return True

    def _in_checkpoint(self) -> bool:
        if self._stored != self.version:
            return False
        self.phase = "gather"
        return True

    # --- evaluation, closing, checkpoints, the end ----------------------------------------------------------------

    def _due(self, *, last: bool) -> list[PlannedNode]:
        """Evaluate nodes that have to run at this version; at the last one all of them."""
        found = [
            n for n in self._nodes.values() if n.work == "evaluate" and self._evaluated.get(n.name) != self.version
        ]
        return [n for n in found if last or self.version % n.every == 0]

    def _evaluate_or_close(self, due: list[PlannedNode]) -> None:
        if not due:
            self._close_step()
            return
        self._round = EvaluationRound(self.plan, due, self._rows_of, self.version, self._blocks)
        self.phase = "evaluate"
        self._assign(self._round.begin(), self.version)

    def _close_step(self, *, evaluated: bool = False) -> None:
        """Say that the Step is complete; once more where an evaluation turned out to be due after that."""
        if evaluated or self.version > self._closed:
            self._closed = self.version
            self._out.append(StepClosed(step=self.version, metrics=self._metrics))
            self._metrics = {}
        every = self.settings.checkpoint_every
        if every and self.version % every == 0 and self._stored != self.version:
            self._checkpoint()
        else:
            self.phase = "gather"

    def _checkpoint(self) -> None:
        self.phase = "checkpoint"
        rows: dict[str, tuple[Keys, Gather]] = {}
        for lane in self._lanes.values():
            if lane.count[FINISHED]:
                for node in lane.nodes:
                    stored = lane.stored(node.name)
                    gather, _ = self._blocks.gather(node.name, (), stored.block, stored.row)
                    rows[node.name] = (stored.keys, gather)
        sources = {name: admission.cut() for name, admission in self._admissions.items()}
        self._out.append(Checkpoint(step=self.version, sources=sources, rows=rows))

    def _end(self) -> bool:
        """Whatever is left to do before the run is over, one after another: evaluate, store, finish."""
        due = [] if self._stop else self._due(last=True)
        if due:  # that this was the last version is known only now: what was on its way came to nothing
            self._evaluate_or_close(due)
        elif self._stored != self.version:
            self._checkpoint()
        else:
            reason = self._stop or ("all steps are done" if self._done() else "the data has ended")
            self._finish(Finish(reason=reason))
        return True

    def _fail(self, error: str) -> None:
        if self.phase != "finished":
            self._finish(Finish(reason="failed", error=error))

    def _finish(self, message: Finish) -> None:
        """Nothing is wanted any longer; chunks under way come to nothing, and what they read goes when they end."""
        self.phase = "finished"
        if self._run is not None:
            self._run.release()
        if self._round is not None:
            self._round.release()
        for admission in self._admissions.values():
            admission.abandon()
        self._release()
        self._out.append(message)

    def _stopping(self) -> bool:
        """Whether the run ends here because somebody asked. In a synchronous run a Step begins with its admission, and
        is finished first: given up and begun again, its rows would be others.
        """
        begun = any(a.source.max_lag == 0 and a.lane.outstanding for a in self._admissions.values())
        return bool(self._stop) and (self._at_once or not begun)

    def _done(self) -> bool:
        return self.settings.steps is not None and self.version >= self.settings.steps

    def _drained(self) -> bool:
        """Whether no further Step can be formed: some source has nothing left."""
        return any(admission.exhausted for admission in self._admissions.values())

    # --- assignments --------------------------------------------------------------------------------------------

    def _assign(self, ready: Iterable[Ready], step: int) -> None:
        self._out += [self._dispatch.assign(each, step) for each in ready]

    def _measure(self, run: StepRun) -> None:
        lag = self.version - np.concatenate([self._lanes[name].versions(slots) for name, slots in run.taken.items()])
        self._metrics = {
            "policy/lag/mean": float(lag.mean()) if len(lag) else 0.0,
            "policy/lag/max": float(lag.max()) if len(lag) else 0.0,
            "data/prompts": float(sum(len(s) for s in run.taken.values())),
            "data/dropped": float(self._dropped()),
            "data/admitted": float(self._admitted()),
        }

    def _dropped(self) -> int:
        return sum(admission.dropped for admission in self._admissions.values())

    def _admitted(self) -> int:
        return sum(admission.admitted for admission in self._admissions.values())

    def _lane(self, source: PlannedSource) -> Lane:
        nodes = [n for n in self.plan.nodes if n.region == "stream" and n.source == source.name]
        above = {n.name for n in nodes}
        cut = [gate for n in self._step_nodes for gate in n.gates if gate in above]
        return Lane(source.name, nodes, cut, self._blocks)

    def _release(self) -> None:
        for worker, blocks in self._blocks.drain().items():
            self._out.append(Release(worker=worker, blocks=blocks))
        self._out += [Release(worker=worker, blocks=(block,)) for worker, block in self._versions.drain()]

    def _flush(self) -> list[Instruction]:
        """What is said: to every rank of a node, and only to Workers that have their devices."""
        out = self._told + self._leases.told(self._ranks.told(self._out))
        self._told, self._out = [], []
        return out
