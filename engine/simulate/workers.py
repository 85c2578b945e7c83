"""Simulated workers in simulated time, driven by the real coordinator.

    simulated                 takes                                   answers
    RunChunk                  the rows' times, in their worker        Produced..., Tombstoned..., ChunkDone
    TrainStep                 a time, in its worker                   Stepped; of a rank group Prepared,
                                                                      and after Go, Stepped
    Wake, Sleep               a time                                  Woken, Slept
    Offer                     a time, in its worker                   Offered
    Publish, Follow           a time, in its worker                   Loaded
    Evaluate, Record          a time, in their workers                Evaluated, Recorded
    Checkpoint                a time                                  Checkpointed
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
    Go,
    Instruction,
    Loaded,
    Offer,
    Offered,
    Prepared,
    Produced,
    Publish,
    Record,
    Recorded,
    Ref,
    Release,
    RunChunk,
    Sleep,
    Slept,
    SourceOpened,
    Stepped,
    StopRequested,
    Tombstoned,
    TrainStep,
    Wake,
    Woken,
)
from engine.plan.plan import Plan, PlannedNode
from engine.simulate.behaviour import Outcomes, Timing
from engine.simulate.clock import Clock
from engine.simulate.groups import Devices, RankGroups
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
        self._groups, self._devices = RankGroups(plan), Devices(plan)
        self.finish: Finish | None = None
        self._rows = rows
        self._timing = timing
        self._outcomes = outcomes
        self._times = timing.generator()
        self._nodes = {n.name: n for n in plan.nodes}
        self._queues: dict[str, deque[Task]] = {w: deque() for w in plan.workers}
        self._first: dict[str, deque[Task]] = {w: deque() for w in plan.workers}
        self._busy: set[str] = set()
        self._loaded_at: dict[str, float] = {}
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
            case TrainStep() if instruction.mine is not None:
                self._devices.check(instruction.worker)
                self._groups.told(instruction)
                self._enqueue(instruction.worker, lambda done: self._prepare(instruction, done))
            case Go():
                message, done = self._groups.begin(instruction)
                self._train(message, done)
            case TrainStep():
                self._check(instruction)
                self._enqueue(instruction.worker, lambda done: self._train(instruction, done))
            case Evaluate():
                self._check(instruction)
                self._enqueue(instruction.worker, lambda done: self._evaluate(instruction, done))
            case Offer():
                self._enqueue(instruction.worker, lambda done: self._offer(instruction, done))
            case Publish() | Follow():
                self._load(instruction)
            case Record():
                self.outbox.check(instruction.keys, instruction.inputs, self.plan.recorded)
                self._enqueue(instruction.worker, lambda done: self._record(instruction, done))
            case Wake():
                self._devices.wake(instruction.worker)
                self._later(self._timing.load, Woken(worker=instruction.worker))
            case Sleep():
                self._sleep(instruction.worker)
            case Release():
                self.outbox.release(instruction.worker, instruction.blocks)
            case Checkpoint():
                self.clock.after(self._vary(self._timing.store), lambda: self._store(instruction))
            case Finish():
                self.finish = instruction

    def _check(self, message: RunChunk | TrainStep | Evaluate) -> None:
        mine = message.mine if isinstance(message, TrainStep) else None
        keys = message.keys if mine is None else message.keys.take(mine)
        self.outbox.check(keys, message.inputs, self._nodes[message.node].inputs)

    def _record(self, message: Record, done: Callable[[], None]) -> None:
        def end() -> None:
            self.outbox.check(message.keys, message.inputs, self.plan.recorded)
            self._hear(Recorded(step=message.step))
            done()

        self.clock.after(self._vary(self._timing.store), end)

    def _evaluate(self, message: Evaluate, done: Callable[[], None]) -> None:
        def end() -> None:
            self._check(message)
            self._hear(Evaluated(node=message.node, version=message.version))
            done()

        self.clock.after(self._vary(self._timing.store), end)

    def _store(self, message: Checkpoint) -> None:
        rows = {}
        for name, (keys, gather) in message.rows.items():
            self.outbox.check_rows(keys, gather)
            rows[name] = (keys, self.outbox.versions(gather))
        self.history.stored.append(Stored(message=message, rows=rows))
        self._hear(Checkpointed(step=message.step))

    # --- workers ------------------------------------------------------------------------------------------------

    def _enqueue(self, worker: str, task: Task, *, first: bool = False) -> None:
        """first: behind what else is to be first, and before all others."""
        self._devices.check(worker)
        (self._first if first else self._queues)[worker].append(task)
        self._next(worker)

    def _next(self, worker: str) -> None:
        """Begin what is first in the queue of an idle worker."""
        queue = self._first[worker] or self._queues[worker]
        if worker not in self._busy and queue:
            self._busy.add(worker)
            task = queue.popleft()
            self.clock.after(0.0, lambda: task(lambda: self._idle(worker)))

    def _idle(self, worker: str) -> None:
        self._busy.discard(worker)
        self._next(worker)

    def _train(self, message: TrainStep, done: Callable[[], None]) -> None:
        def end() -> None:
            self._check(message)
            gathers = [g for many in message.inputs.values() for g in many]
            versions = {g.producer: self.outbox.versions(g) for g in gathers}
            whole = (message, versions) if message.mine is None else self._groups.ended(message, versions)
            if whole is not None:
                self.history.trained.append(whole)
            self._hear(Stepped(node=message.node, step=message.step, worker=message.worker))
            done()

        self._check(message)
        self.clock.after(self._vary(self._timing.train), end)

    def _prepare(self, message: TrainStep, done: Callable[[], None]) -> None:
        """A rank fetches its rows, and keeps its Worker until it may begin or is told something else."""

        def end() -> None:
            self._check(message)
            self._groups.prepared(message, done)
            self._hear(Prepared(node=message.node, worker=message.worker, sequence=message.sequence))

        self.clock.after(self._vary(self._timing.load), end)

    def _sleep(self, worker: str) -> None:
        """Give the devices back. Raises RunError for a Worker with something under way that it cannot let go."""

        def end(done: Callable[[], None]) -> None:
            self._devices.sleep(worker)
            done()
            self._hear(Slept(worker=worker))

        self._groups.give_up(worker)
        if self._queues[worker] or self._first[worker]:
            raise RunError(f"worker {worker} was sent to sleep with work to do")
        self._enqueue(worker, lambda done: self.clock.after(self._vary(self._timing.load), lambda: end(done)))

    def _offer(self, message: Offer, done: Callable[[], None]) -> None:
        def end() -> None:
            block = self.outbox.offer(message.worker, message.model, message.version)
            self._hear(
                Offered(model=message.model, version=message.version, worker=message.worker, block=block, digest="")
            )
            done()

        self.clock.after(self._vary(self._timing.load), end)

    def _load(self, message: Publish | Follow) -> None:
        """Weights overtake the chunks that wait; in a reader that can be interrupted also the one that runs."""
        self._devices.check(message.worker)

        def loaded(done: Callable[[], None]) -> None:
            if message.source:
                model = message.model if isinstance(message, Publish) else message.leader
                self.outbox.check_offer(message.source, message.block, model, message.version)
            if isinstance(message, Publish):
                self._loads.setdefault((message.reader, message.worker), []).append((self.clock.now, message.version))
            self._hear(Loaded(node=message.reader, model=message.model, version=message.version, worker=message.worker))
            done()

        seconds = self._vary(self._timing.load)
        if self._timing.loads == "interrupt":
            seconds = max(seconds, self._loaded_at.get(message.worker, 0.0) - self.clock.now)  # one after another
            self._loaded_at[message.worker] = self.clock.now + seconds
            self.clock.after(seconds, lambda: loaded(lambda: None))
        else:
            self._enqueue(message.worker, lambda done: self.clock.after(seconds, lambda: loaded(done)), first=True)

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
