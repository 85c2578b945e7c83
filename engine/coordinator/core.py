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
    settle       samples written, readers loaded               Recorded, Loaded
    checkpoint   the checkpoint on disk                        Checkpointed
    finished     nothing

The stream region runs through all of them: a prompt is admitted whenever the bound on outstanding prompts allows it
and no reader above the cut is behind the published version. With max_lag 0 prompts are admitted in waves, while the
run gathers and nothing is on its way, so that what shares a batch never depends on timing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dataflow.batch import Keys
from engine.coordinator import intake
from engine.coordinator.evaluation import EvaluationRound
from engine.coordinator.lane import DROPPED, FINISHED, REJECTED, RUNNING, Lane, Ready
from engine.coordinator.messages import (
    Checkpoint,
    Checkpointed,
    ChunkDone,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Follow,
    Instruction,
    Loaded,
    Produced,
    Publish,
    Record,
    Recorded,
    Ref,
    Release,
    RunChunk,
    SourceCut,
    SourceOpened,
    StepClosed,
    Stepped,
    StopRequested,
    Tombstoned,
    TrainStep,
)
from engine.coordinator.step import StepRun
from engine.coordinator.tables import Blocks
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
        self._sources = {s.name: s for s in plan.sources}
        self._rows_of: dict[str, int] = {}
        self._unopened = {n.name for n in plan.nodes if n.work == "source"}
        self._again: dict[str, list[tuple[int, int]]] = {s: [] for s in self._lanes}
        self._tried = dict.fromkeys(self._lanes, 0)
        self._loading: set[tuple[str, str]] = set()
        self._chunks: dict[int, tuple[PlannedNode, Keys, str]] = {}
        self._load_of: dict[str, int] = {}
        self._next_chunk = 0
        self._sequence = 0
        self._run: StepRun | None = None
        self._training = False
        self._recorded = True
        self._round: EvaluationRound | None = None
        self._evaluated: dict[str, int] = {}
        self._stored = 0
        self._admitted = 0
        self._dropped: list[str] = []
        self._stop = ""
        self._metrics: dict[str, float] = {}
        self._first = True
        self._out: list[Instruction] = []

    # --- the two entries ----------------------------------------------------------------------------------------

    def start(self, restored: Restored | None = None) -> list[Instruction]:
        """Begin, or go on from a checkpoint. Every reader is told the version it has to have."""
        if restored is not None:
            self.version = self._stored = restored.step
            self._first = False
            for name, cut in restored.sources.items():
                rows = dict(restored.rows.get(name, {}))
                self._again[name] = self._lanes[name].restore(cut, rows, self.version)
        self._publish()
        return self._flush()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take note of one event. `now` (seconds, any clock) is carried for policies that will need it."""
        del now
        if self.phase != "finished":
            self._note(event)
            self._advance()
        return self._flush()

    def waiting(self) -> list[str]:
        """Who waits for whom, in words; for the watchdog and for a run that has stopped moving."""
        lines = [f"source {name}: has not opened" for name in sorted(self._unopened)]
        lines += [f"{node}: has not loaded {model!r} version {self.version}" for node, model in sorted(self._loading)]
        for lane in self._lanes.values():
            lines += lane.waiting()
            done = len(lane.slots(FINISHED))
            lines.append(f"intake of {lane.source}: {done} of {self._sources[lane.source].batch} prompts are finished")
        if self._run is not None:
            lines += self._run.waiting()
        if self._round is not None:
            lines += self._round.waiting()
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
            case Loaded():
                if event.version == self.version:
                    self._loading.discard((event.node, event.model))
            case Recorded():
                self._recorded = True
            case Evaluated():
                assert self._round is not None
                self._round.evaluated(event.node)
                self._evaluated[event.node] = event.version
            case Checkpointed():
                self._stored = event.step
            case SourceOpened():
                self._rows_of[event.node] = event.rows
                self._unopened.discard(event.node)
            case StopRequested():
                self._stop = event.reason

    def _produced(self, event: Produced) -> None:
        node = self._nodes[event.node]
        if event.chunk not in self._chunks:  # of a chunk that was given up: let its rows go
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
        if event.chunk not in self._chunks:
            return
        node, keys, worker = self._chunks.pop(event.chunk)
        self._load_of[worker] -= len(keys)
        missing = None
        if node.region == "evaluation":
            assert self._round is not None
            missing = self._round.closed(node, keys)
        elif node.region == "step":
            assert self._run is not None
            self._run.closed(node.name)
        else:
            missing = self._lanes[node.source].closed(node, keys)
        if missing is not None:
            self._fail(f"{node.name}: its kernel ended a chunk without row (position, sample, attempt) {missing}")

    def _tombstoned(self, event: Tombstoned) -> None:
        node = self._nodes[event.node]
        if node.region != "stream":
            self._fail(f"{event.node}: row {event.key} failed where no group can be dropped: {event.error}")
        elif self._lanes[node.source].drop(event.key[0], event.key[2]):
            self._dropped.append(f"{event.node} row {event.key}: {event.error}")
            if len(self._dropped) > max(10, self.settings.error_budget * self._admitted):
                spent = f"{len(self._dropped)} of {self._admitted} admitted prompts were dropped, more than the error budget"
                self._fail(f"{spent} of {self.settings.error_budget:.0%}; the first: {self._dropped[0]}")

    # --- what follows -------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Move on as far as is possible without a further event."""
        moved = True
        while moved and self.phase != "finished":
            moved = False
            for lane in self._lanes.values():
                for ready in lane.pump():
                    self._assign(ready, 0)
                moved |= self._give_back(lane)
            moved |= getattr(self, f"_in_{self.phase}")()
            for source in self.plan.sources:
                moved |= self.phase != "finished" and self._admit(source)
        for worker, block in self._blocks.drain():
            self._out.append(Release(worker=worker, blocks=(block,)))

    def _in_opening(self) -> bool:
        if self._unopened or self._loading:
            return False
        self._begin_evaluation(at_start=self._first)
        return True

    def _in_evaluate(self) -> bool:
        assert self._round is not None
        if self._loading:
            return False
        for ready in self._round.pump():
            self._assign(ready, self.version)
        for node, keys, inputs in self._round.complete():
            message = Evaluate(node=node.name, worker=node.workers[0], version=self.version, keys=keys, inputs=inputs)
            self._out.append(message)
        if not self._round.done:
            return False
        self._round.release()
        self._round = None
        self._close_step()
        return True

    def _in_gather(self) -> bool:
        if self._stop or self._done():
            return self._end()
        taken = {source.name: self._intake(source) for source in self.plan.sources}
        exhausted = [name for name in taken if self._exhausted(name) and not len(self._lanes[name].slots(FINISHED))]
        if exhausted:
            return self._end()
        if any(not len(slots) for slots in taken.values()):
            return False
        for name, slots in taken.items():
            self._lanes[name].take(slots)
            self._tried[name] = self._lanes[name].outstanding() - len(slots)
        self._run = StepRun(self.version + 1, self._step_nodes, self._lanes, taken, self._blocks)
        self.phase = "step"
        return True

    def _in_step(self) -> bool:
        run = self._run
        assert run is not None
        for ready in run.ready():
            self._assign(ready, run.step)
        node = None if self._training else run.next_train()
        if node is not None:
            return self._train(run, node)
        if not run.complete:
            return False
        self._measure(run)
        self.version = run.step
        self._recorded = not self.plan.recorded
        if self.plan.recorded:
            keys = run.keys(self.plan.recorded)
            self._out.append(Record(step=run.step, keys=keys, inputs=run.inputs(self.plan.recorded, keys)))
        self._publish()
        self.phase = "settle"
        return True

    def _train(self, run: StepRun, node: PlannedNode) -> bool:
        keys = run.keys(node.inputs)
        if not len(keys):
            run.trained()
            return True
        self._training = True
        self._sequence += 1
        inputs = run.inputs(node.inputs, keys)
        worker = node.workers[0]
        message = TrainStep(
            sequence=self._sequence, node=node.name, worker=worker, step=run.step, keys=keys, inputs=inputs
        )
        self._out.append(message)
        return False

    def _in_settle(self) -> bool:
        if not self._recorded or self._loading:
            return False
        assert self._run is not None
        for name, slots in self._run.taken.items():
            self._lanes[name].retire(slots)
        self._run.release()
        self._run = None
        self._begin_evaluation()
        return True

    def _in_checkpoint(self) -> bool:
        if self._stored != self.version:
            return False
        self.phase = "gather"
        return True

    # --- evaluation, closing, checkpoints, the end ----------------------------------------------------------------

    def _begin_evaluation(self, *, at_start: bool = False) -> None:
        last = not at_start and (self._done() or bool(self._stop) or self._drained())
        due = [
            n
            for n in self._nodes.values()
            if n.work == "evaluate" and (at_start or last or self.version % n.every == 0)
        ]
        due = [n for n in due if self._evaluated.get(n.name) != self.version]
        if self.phase == "opening" and not at_start:
            due = []
        if due:
            self._round = EvaluationRound(self.plan, due, self._rows_of, self.version, self._blocks)
            self.phase = "evaluate"
            for ready in self._round.begin():
                self._assign(ready, self.version)
        else:
            self._close_step()

    def _close_step(self) -> None:
        if self._first or self.version > self._stored or self._metrics:
            self._out.append(StepClosed(step=self.version, metrics=dict(self._metrics)))
        self._first = False
        self._metrics = {}
        every = self.settings.checkpoint_every
        if every and self.version and self.version % every == 0 and self._stored != self.version:
            self._checkpoint()
        else:
            self.phase = "gather"

    def _checkpoint(self) -> None:
        self.phase = "checkpoint"
        rows = {}
        for lane in self._lanes.values():
            if len(lane.slots(FINISHED)):
                for node in lane.nodes:
                    stored = lane.stored(node.name)
                    rows[node.name] = (stored.keys, self._blocks.gather(node.name, (), stored.block, stored.row))
        sources = {name: lane.cut_state(self._again[name]) for name, lane in self._lanes.items()}
        self._out.append(Checkpoint(step=self.version, sources=sources, rows=rows))

    def _end(self) -> bool:
        if self._stored != self.version:
            self._checkpoint()
            return False
        reason = self._stop or ("all steps are done" if self._done() else "the data has ended")
        self._finish(Finish(reason=reason))
        return True

    def _fail(self, error: str) -> None:
        if self.phase != "finished":
            self._finish(Finish(reason="failed", error=error))

    def _finish(self, message: Finish) -> None:
        self.phase = "finished"
        self._out.append(message)

    def _done(self) -> bool:
        return self.settings.steps is not None and self.version >= self.settings.steps

    # --- versions -----------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Tell every reader of a trained Model to load the present version; followers move with their leader."""
        models = {m.name: m for m in self.plan.models}
        for model in self.plan.models:
            if model.writer:
                for reader in model.readers:
                    self._loading.add((reader, model.name))
                    alias = reader in model.aliases
                    self._out.append(
                        Publish(model=model.name, writer=model.writer, reader=reader, version=self.version, alias=alias)
                    )
            elif model.follows and models[model.follows].writer and self.version % model.every == 0:
                for reader in model.readers:
                    self._loading.add((reader, model.name))
                    writer = models[model.follows].writer
                    self._out.append(
                        Follow(
                            model=model.name,
                            leader=model.follows,
                            writer=writer,
                            reader=reader,
                            rate=model.rate,
                            version=self.version,
                        )
                    )

    # --- admission and intake -----------------------------------------------------------------------------------

    def _admit(self, source: PlannedSource) -> bool:
        lane = self._lanes[source.name]
        if self._stop or self.phase in ("opening", "checkpoint", "finished") or self._behind(lane):
            return False
        if source.max_lag == 0 and (self.phase != "gather" or lane.running()):
            return False
        room = (1 + source.max_lag) * source.batch
        if self.settings.steps is not None:
            room = min(room, (self.settings.steps - self.version) * source.batch)
        room -= lane.outstanding()
        if room <= 0 or self._exhausted_attempts(source, lane):
            return False
        chosen = self._next_prompts(lane, min(room, source.cohort or room))
        if not chosen:
            return False
        self._admitted += len(chosen)
        self._tried[source.name] += len(chosen)
        self._assign(lane.admit([p for p, _ in chosen], [a for _, a in chosen], self.version), 0)
        return True

    def _behind(self, lane: Lane) -> bool:
        """Whether a reader above this cut has not loaded the published version yet."""
        return any((n.name, use.model) in self._loading for n in lane.nodes for use in n.models)

    def _next_prompts(self, lane: Lane, most: int) -> list[tuple[int, int]]:
        again = self._again[lane.source]
        chosen, self._again[lane.source] = again[:most], again[most:]
        fresh = range(lane.next, min(lane.next + most - len(chosen), self._limit(lane.source)))
        return chosen + [(p, 0) for p in fresh]

    def _limit(self, source: str) -> int:
        return self._rows_of[source] if self.settings.steps is None else np.iinfo(np.int64).max

    def _exhausted(self, source: str) -> bool:
        """Whether no further prompt of this source can come and none is on its way."""
        lane = self._lanes[source]
        return not self._again[source] and lane.next >= self._limit(source) and not lane.running()

    def _drained(self) -> bool:
        return any(self._exhausted(s) and not len(self._lanes[s].slots(FINISHED)) for s in self._lanes)

    def _exhausted_attempts(self, source: PlannedSource, lane: Lane) -> bool:
        most = min((n.max_attempts for n in lane.nodes if n.refill), default=0)
        if not most or self._tried[source.name] < most * source.batch or lane.running():
            return False
        kept, tried = len(lane.slots(FINISHED)), self._tried[source.name]
        name = next(n.name for n in lane.nodes if n.refill)
        self._fail(
            f"step {self.version + 1}: {name} kept {kept} of {tried} groups in {most} attempts; "
            "the data is too easy or too hard, or the reward constant"
        )
        return True

    def _give_back(self, lane: Lane) -> bool:
        """Retire what was rejected or dropped: its admission credit returns."""
        gone = np.concatenate([lane.slots(REJECTED), lane.slots(DROPPED)])
        if len(gone):
            lane.retire(gone)
        return bool(len(gone))

    def _intake(self, source: PlannedSource) -> np.ndarray:
        """Slots of the prompts that form the next Step; empty while they have to be waited for."""
        lane = self._lanes[source.name]
        finished = lane.slots(FINISHED)
        if source.intake == "drop":
            old = intake.too_old(lane.begun[finished], max_lag=source.max_lag, version=self.version)
            if old.any():
                self._again[source.name] += lane.again(finished[old])
                finished = finished[~old]
        begun, running = lane.begun[finished], lane.begun[lane.slots(RUNNING)]
        last = not self._again[source.name] and lane.next >= self._limit(source.name)
        if last and not len(running) and len(finished) < source.batch and self.settings.last_batch == "drop":
            lane.retire(finished)
            return finished[:0]
        if source.intake == "exact":
            chosen = intake.exact(
                begun, running, batch=source.batch, max_lag=source.max_lag, version=self.version, last=last
            )
        else:
            chosen = intake.oldest(begun, running, batch=source.batch, last=last)
        return finished[chosen]

    # --- assignments --------------------------------------------------------------------------------------------

    def _assign(self, ready: Ready, step: int) -> None:
        worker = min(ready.node.workers, key=lambda w: self._load_of.get(w, 0))
        self._load_of[worker] = self._load_of.get(worker, 0) + len(ready.keys)
        self._chunks[self._next_chunk] = (ready.node, ready.keys, worker)
        self._out.append(
            RunChunk(
                id=self._next_chunk,
                node=ready.node.name,
                worker=worker,
                step=step,
                keys=ready.keys,
                inputs=ready.inputs,
            )
        )
        self._next_chunk += 1

    def _measure(self, run: StepRun) -> None:
        lags = [self._lanes[name].versions(slots) for name, slots in run.taken.items()]
        versions = np.concatenate(lags) if lags else np.zeros(0, dtype=np.int32)
        lag = self.version - versions
        self._metrics |= {
            "policy/lag/mean": float(lag.mean()) if len(lag) else 0.0,
            "policy/lag/max": float(lag.max()) if len(lag) else 0.0,
            "data/prompts": float(sum(len(s) for s in run.taken.values())),
            "data/dropped": float(len(self._dropped)),
            "data/admitted": float(self._admitted),
        }

    def _lane(self, source: PlannedSource) -> Lane:
        nodes = [n for n in self.plan.nodes if n.region == "stream" and n.source == source.name]
        above = {n.name for n in nodes}
        below = [n for n in self.plan.nodes if n.region == "step"]
        cut = [gate for n in below for gate in n.gates if gate in above]
        fetched = [f.producer for n in below for i in n.inputs for f in i.fetches if f.producer in above]
        return Lane(source.name, nodes, cut or fetched, self._blocks)

    def _flush(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out
