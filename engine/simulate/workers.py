"""Simulated workers in simulated time, driven by the real coordinator.

    simulated                 takes                                   answers
    RunChunk                  the rows' times, in their worker        Produced..., Tombstoned..., ChunkDone
    TrainStep                 a time, in its worker                   Stepped
    Publish, Follow           a time, in every replica of the reader  Loaded
    Evaluate, Record,         a time                                  Evaluated, Recorded,
      Checkpoint                                                      Checkpointed
    Release                   nothing                                 -

Owns: doing what the coordinator says, one thing after another in each worker, and checking
that it can be done. Does not own: how long things take and what comes of a row
(behaviour.py), nor whether what was done makes sense (the tests).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from dataflow.batch import Keys
from dataflow.errors import RunError
from engine.coordinator.core import Coordinator, Restored, Settings
from engine.coordinator.messages import (
    NO_VERSION,
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
    SourceOpened,
    Stepped,
    StopRequested,
    Tombstoned,
    TrainStep,
)
from engine.plan.plan import Plan, PlannedNode
from engine.simulate.behaviour import Outcomes, Timing
from engine.simulate.clock import Clock
from engine.simulate.outbox import Outbox

Task = Callable[[Callable[[], None]], None]
"""Begins something, and calls what it is given when that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """A checkpoint that is on disk: the message, and for each node the finished rows (keys, versions)."""

    message: Checkpoint
    rows: dict[str, tuple[Keys, np.ndarray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A chunk saw a trained Model: at its begin `first`, at its end `last`; `step` as the coordinator numbered it."""

    node: str
    region: str
    step: int
    first: int
    last: int


@dataclass(slots=True, eq=False)
class History:
    """Everything that was said, and when; for the tests and for reports."""

    instructions: list[tuple[float, Instruction]] = field(default_factory=list)
    events: list[tuple[float, Event]] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    trained: list[tuple[TrainStep, dict[str, np.ndarray]]] = field(default_factory=list)
    """Train nodes' Steps as they ended, with the version of each row by producer."""
    stored: list[Stored] = field(default_factory=list)


class Simulation:
    """One run of a plan in simulated time. rows: rows of each source in one pass."""

    def __init__(
        self, plan: Plan, settings: Settings, *, rows: dict[str, int], timing: Timing, outcomes: Outcomes
    ) -> None:
        self.plan = plan
        self.coordinator = Coordinator(plan, settings)
        self.clock = Clock()
        self.outbox = Outbox()
        self.history = History()
        self.finish: Finish | None = None
        self._rows = rows
        self._timing = timing
        self._outcomes = outcomes
        self._times = timing.generator()
        self._nodes = {n.name: n for n in plan.nodes}
        self._queues: dict[str, deque[Task]] = {w: deque() for w in plan.workers}
        self._busy: set[str] = set()
        self._loads: dict[tuple[str, str], list[tuple[float, int]]] = {}
        """(node, worker) -> (time, version) of everything published that was loaded there."""

    # --- running ------------------------------------------------------------------------------------------------

    def begin(self, restored: Stored | None = None) -> None:
        """Start the coordinator, with what a checkpoint kept put into the outbox anew."""
        self._say(self.coordinator.start(self._restored(restored) if restored is not None else None))
        for node in self.plan.nodes:
            if node.work == "source":
                self._later(self._timing.load, SourceOpened(node=node.name, rows=self._rows[node.name]))

    def run(self, *, until: Callable[[], bool] | None = None) -> Finish | None:
        """Until the run is over and every worker idle, or until something holds. Raises RunError for a deadlock."""
        while until is None or not until():
            if not self.clock.step():
                if self.finish is None:
                    raise RunError("nothing is under way and the run has not finished:\n  " + self._waiting())
                return self.finish
        return None

    def stop(self, reason: str) -> None:
        """Ask for an early end."""
        self._hear(StopRequested(reason=reason))

    def _waiting(self) -> str:
        return "\n  ".join([f"phase {self.coordinator.phase}", *self.coordinator.waiting()])

    def _restored(self, stored: Stored) -> Restored:
        rows: dict[str, dict[str, Ref]] = {}
        for name, (keys, version) in stored.rows.items():
            node = self._nodes[name]
            rows.setdefault(node.source, {})[name] = self.outbox.keep(node.workers[0], name, keys, version)
        return Restored(step=stored.message.step, sources=stored.message.sources, rows=rows)

    def _hear(self, event: Event) -> None:
        self.history.events.append((self.clock.now, event))
        self._say(self.coordinator.handle(event, self.clock.now))

    def _later(self, seconds: float, event: Event) -> None:
        self.clock.after(self._vary(seconds), lambda: self._hear(event))

    def _vary(self, seconds: float) -> float:
        return seconds * self._times.lognormvariate(0.0, self._timing.tail)

    # --- instructions -------------------------------------------------------------------------------------------

    def _say(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            self.history.instructions.append((self.clock.now, instruction))
            self._obey(instruction)

    def _obey(self, instruction: Instruction) -> None:
        match instruction:
            case RunChunk():
                self._check(instruction)
                self._enqueue(instruction.worker, lambda done: self._run_chunk(instruction, done))
            case TrainStep():
                self._check(instruction)
                self._enqueue(instruction.worker, lambda done: self._train(instruction, done))
            case Evaluate():
                self._check(instruction)
                self._later(self._timing.store, Evaluated(node=instruction.node, version=instruction.version))
            case Publish() | Follow():
                self._load(instruction)
            case Record():
                self._record(instruction)
            case Release():
                self.outbox.release(instruction.worker, instruction.blocks)
            case Checkpoint():
                self.clock.after(self._vary(self._timing.store), lambda: self._store(instruction))
            case Finish():
                self.finish = instruction

    def _check(self, message: RunChunk | TrainStep | Evaluate) -> None:
        self.outbox.check(message.keys, message.inputs, self._nodes[message.node].inputs)

    def _record(self, message: Record) -> None:
        def end() -> None:
            self.outbox.check(message.keys, message.inputs, self.plan.recorded)
            self._hear(Recorded(step=message.step))

        self.outbox.check(message.keys, message.inputs, self.plan.recorded)
        self.clock.after(self._vary(self._timing.store), end)

    def _store(self, message: Checkpoint) -> None:
        rows = {}
        for name, (keys, gather) in message.rows.items():
            self.outbox.check_rows(keys, gather)
            rows[name] = (keys, self.outbox.versions(gather))
        self.history.stored.append(Stored(message=message, rows=rows))
        self._hear(Checkpointed(step=message.step))

    # --- workers ------------------------------------------------------------------------------------------------

    def _enqueue(self, worker: str, task: Task) -> None:
        self._queues[worker].append(task)
        self._next(worker)

    def _next(self, worker: str) -> None:
        """Begin what is first in the queue of an idle worker."""
        if worker not in self._busy and self._queues[worker]:
            self._busy.add(worker)
            task = self._queues[worker].popleft()
            self.clock.after(0.0, lambda: task(lambda: self._idle(worker)))

    def _idle(self, worker: str) -> None:
        self._busy.discard(worker)
        self._next(worker)

    def _train(self, message: TrainStep, done: Callable[[], None]) -> None:
        def end() -> None:
            self._check(message)
            gathers = [g for many in message.inputs.values() for g in many]
            self.history.trained.append((message, {g.producer: self.outbox.versions(g) for g in gathers}))
            self._hear(Stepped(node=message.node, step=message.step))
            done()

        self._check(message)
        self.clock.after(self._vary(self._timing.train), end)

    def _load(self, message: Publish | Follow) -> None:
        """Every replica of a reader takes the weights; the last one's arrival is what the coordinator hears of."""
        workers = list(self._nodes[message.reader].workers)
        left = set(workers)

        def loaded(worker: str, done: Callable[[], None]) -> None:
            if isinstance(message, Publish):
                self._loads.setdefault((message.reader, worker), []).append((self.clock.now, message.version))
            left.discard(worker)
            if not left:
                self._hear(Loaded(node=message.reader, model=message.model, version=message.version))
            done()

        for worker in workers:
            seconds = self._vary(self._timing.load)
            if self._timing.loads == "interrupt":
                self.clock.after(seconds, lambda w=worker: loaded(w, lambda: None))
            else:
                self._enqueue(worker, lambda done, w=worker, s=seconds: self.clock.after(s, lambda: loaded(w, done)))

    # --- chunks -------------------------------------------------------------------------------------------------

    def _run_chunk(self, chunk: RunChunk, done: Callable[[], None]) -> None:
        """Produce the rows of a chunk in batches as they get ready, some of them failing; then end it."""
        self._check(chunk)
        node, begun = self._nodes[chunk.node], self.clock.now
        keys = chunk.keys.expand(node.rows // node.inner) if node.relation == "expand" else chunk.keys
        starts, ends = self._times_of(node, len(keys))
        failed = self._outcomes.failed(node.name, keys)
        wanted = ~failed & self._outcomes.kept(node.name, keys) if node.relation == "subset" else ~failed
        for rows in self._batches(ends):
            when = max(ends[rows].tolist(), default=0.0)
            self.clock.after(when, lambda rows=rows: self._yield(chunk, keys, rows, wanted, failed, begun + starts))

        def end() -> None:
            self._check(chunk)
            self._seen(chunk, node, begun)
            self._hear(ChunkDone(chunk=chunk.id, node=chunk.node))
            done()

        self.clock.after(max(ends.tolist(), default=0.0), end)

    def _yield(
        self, chunk: RunChunk, keys: Keys, rows: np.ndarray, wanted: np.ndarray, failed: np.ndarray, starts: np.ndarray
    ) -> None:
        good = rows[wanted[rows]]
        version = np.array([self._version(chunk, float(starts[r])) for r in good], dtype=np.int32)
        ref = self.outbox.keep(chunk.worker, chunk.node, keys.take(good), version)
        self._hear(Produced(chunk=chunk.id, node=chunk.node, ref=ref))
        for key in keys.take(rows[failed[rows]]).rows():
            self._hear(Tombstoned(chunk=chunk.id, node=chunk.node, key=key, error="the outcome says so"))

    def _times_of(self, node: PlannedNode, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds from the chunk's begin at which each row begins and ends, given the node's slots."""
        free = [0.0] * (self._timing.slots if node.work == "decode" else 1)
        starts, ends = np.zeros(rows), np.zeros(rows)
        for row in range(rows):
            starts[row] = heapq.heappop(free)
            ends[row] = starts[row] + self._timing.of_row(node.name, self._times)
            heapq.heappush(free, float(ends[row]))
        return starts, ends

    def _batches(self, ends: np.ndarray) -> Iterator[np.ndarray]:
        """The rows in the order in which they end, cut at random; now and then an empty batch comes first."""
        order = np.argsort(ends, kind="stable")
        parts = self._times.choice((1, 1, 2, len(order)))
        cuts = sorted({0, len(order), *(self._times.randint(0, len(order)) for _ in range(parts - 1))})
        if self._times.random() < 0.1:
            yield order[:0]
        for first, last in pairwise(cuts):
            rows = order[first:last]
            yield rows[self._times.sample(range(len(rows)), len(rows))]

    def _version(self, chunk: RunChunk, start: float) -> int:
        """The version that a row which began then is made with; NO_VERSION without a published Model."""
        loads = self._loads.get((chunk.node, chunk.worker), ())
        return max((version for when, version in loads if when <= start), default=NO_VERSION)

    def _seen(self, chunk: RunChunk, node: PlannedNode, begun: float) -> None:
        first, last = self._version(chunk, begun), self._version(chunk, self.clock.now)
        if first != NO_VERSION:
            read = Read(node=node.name, region=node.region, step=chunk.step, first=first, last=last)
            self.history.reads.append(read)
