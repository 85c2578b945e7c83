"""Simulated Workers in simulated time, driven by the real coordinator.

Owns: the run as a whole: messages on their way, the loop's own instructions (checkpoints, the end),
and Workers that die, stop, and are begun anew. Does not own: what a Worker does (incarnation.py),
how long that takes and what comes of it (behaviour.py), who is hit when (faults.py), nor whether
what was done makes sense (the tests).

Without faults every message arrives at once. With them it takes a time of its own, may come twice,
and may come after its sender's death; both ends put that right by numbers
(engine/coordinator/ordered_inbox.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dataflow.batch import Keys
from dataflow.errors import RunError
from engine.coordinator.core import Coordinator, Restored, Settings
from engine.coordinator.messages import (
    Checkpoint,
    Checkpointed,
    ChunkDone,
    Evaluated,
    Event,
    Finish,
    From,
    Instruction,
    Recorded,
    Respawn,
    Rollback,
    SourceOpened,
    StepClosed,
    StopRequested,
    ToWorker,
    TrainStep,
    Warn,
    WorkerLost,
    WorkerOpened,
)
from engine.coordinator.ordered_inbox import OrderedInbox
from engine.coordinator.refs import Gather, Ref
from engine.plan.plan import Plan
from engine.simulate.asking import Asked, Asking
from engine.simulate.behaviour import Outcomes, Timing
from engine.simulate.clock import Clock
from engine.simulate.faults import Blow, Fate, Faults
from engine.simulate.groups import Devices, RankGroups
from engine.simulate.outbox import Outbox
from engine.simulate.simulated_worker import Read, SimulatedWorker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """A checkpoint that is on disk: the message, and for each node the finished rows (keys,
    versions).
    """

    message: Checkpoint
    rows: dict[str, tuple[Keys, np.ndarray]]


@dataclass(slots=True, eq=False)
class History:
    """Everything that was said, and when, each thing once; for the tests and for reports."""

    instructions: list[tuple[float, Instruction]] = field(default_factory=list)
    events: list[tuple[float, Event]] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    trained: list[tuple[TrainStep, dict[str, np.ndarray]]] = field(default_factory=list)
    """Train nodes' Steps as they ended, with the version of each row by producer."""
    stored: list[Stored] = field(default_factory=list)
    samples: dict[int, Mapping[str, Keys]] = field(default_factory=dict)
    """Step -> the rows of its file, as it was written last, and not deleted."""


class Simulation:
    """One run of a plan in simulated time. rows: rows of each source in one pass."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        *,
        rows: dict[str, int],
        timing: Timing,
        outcomes: Outcomes,
        faults: Faults | None = None,
    ) -> None:
        self.plan = plan
        self.coordinator = Coordinator(plan, settings)
        self.clock = Clock()
        self.outbox = Outbox()
        self.history = History()
        self.groups, self.devices, self.asking = RankGroups(plan), Devices(plan), Asking()
        self.timing, self.outcomes = timing, outcomes
        self.times = timing.generator()
        self.nodes = {n.name: n for n in plan.nodes}
        self.finish: Finish | None = None
        self.gone_back: Rollback | None = None
        self._rows = rows
        self.faulty = faults is not None
        self._faults = faults
        self._fate = Fate(faults) if faults is not None else None
        self._workers = {name: SimulatedWorker(self, name, 0) for name in plan.workers}
        self._heard: dict[str, OrderedInbox[Event]] = {
            name: OrderedInbox() for name in plan.workers
        }
        """What the coordinator has taken note of, so that history has everything once."""
        self._hits = dict.fromkeys(plan.workers, 0)
        """Deaths of each Worker since it last finished something."""
        self.deaths = 0
        self._stateful = plan.stateful
        trains = [n for n in plan.nodes if n.work == "train"]
        self._writers = {w: [n.name for n in trains if w in n.workers] for w in plan.stateful}
        """Worker -> the nodes that it writes into a checkpoint; in every Worker in the same order.
        """
        self._closed = 0
        """The last Step that was closed."""

    # --- running ----------------------------------------------------------------------------------

    def begin(self, restored: Stored | None = None) -> None:
        """Start the coordinator, with what a checkpoint kept put into the outbox anew."""
        for worker in self._workers.values():
            worker.opened = True
        self._closed = restored.message.step if restored is not None else 0
        self._say(
            self.coordinator.start(self._restored(restored) if restored is not None else None)
        )
        for node in self.plan.nodes:
            if node.work == "source":
                self._open_source(self._workers[node.workers[0]], node.name)

    def run(self, *, until: Callable[[], bool] | None = None) -> Finish | None:
        """Until the run is over and every worker idle, until it goes back (None), or until
        something holds (None).

        Raises RunError for a deadlock.
        """
        while until is None or not until():
            if self.gone_back is not None:
                return None
            if not self.clock.step():
                if self.finish is None:
                    raise RunError(
                        "nothing is under way and the run has not finished:\n  " + self._waiting()
                    )
                return self.finish
        return None

    def stop(self, reason: str) -> None:
        """Ask for an early end."""
        self.asking.in_turn(partial(self._hear, StopRequested(reason=reason)))

    def _waiting(self) -> str:
        return "\n  ".join([f"phase {self.coordinator.phase}", *self.coordinator.waiting()])

    def _restored(self, stored: Stored) -> Restored:
        rows: dict[str, dict[str, Ref]] = {}
        for name, (keys, version) in stored.rows.items():
            node = self.nodes[name]
            rows.setdefault(node.source, {})[name] = self.outbox.keep(
                node.workers[0], name, keys, version
            )
        message = stored.message
        return Restored(
            step=message.step, sources=message.sources, rows=rows, evaluated=message.evaluated
        )

    # --- events -----------------------------------------------------------------------------------

    def sent(self, worker: SimulatedWorker, event: Event) -> None:
        """A Worker says something."""
        if self._fate is None:
            self.asking.in_turn(partial(self._hear, event))
            return
        message = From(worker=worker.name, epoch=worker.epoch, number=worker.said, event=event)
        worker.said += 1
        for seconds in self._fate.arrivals():
            self.clock.after(seconds, partial(self.asking.in_turn, partial(self._arrived, message)))

    def _arrived(self, message: From) -> None:
        events = self._heard[message.worker].take(message.epoch, message.number, message.event)
        for event in events:
            self.history.events.append((self.clock.now, event))
            if isinstance(event, (ChunkDone, Recorded, Evaluated)):
                self._hits[message.worker] = int(
                    self._workers[message.worker].gone
                )  # that one is told of later
        self._handle(message, events)
        self._strike()

    def _hear(self, event: Event) -> None:
        self.history.events.append((self.clock.now, event))
        self._handle(event, [event])

    def _handle(self, message: Event | From, events: Sequence[Event]) -> None:
        """The coordinator hears of it; of an evaluation when its version was kept, as if each were
        the best so far.
        """
        writer = next((m.writer for m in self.plan.models if m.writer), "")
        if writer and any(isinstance(event, Evaluated) for event in events):
            ranks = self.nodes[writer].workers
            self._ask(dict.fromkeys(ranks, (writer,)), {}, lambda _: self._to_coordinator(message))
        else:
            self._to_coordinator(message)

    def _to_coordinator(self, message: Event | From) -> None:
        self._say(self.coordinator.handle(message, self.clock.now))

    def fetching(self) -> float:
        """How long a fetch takes."""
        return (
            self._fate.upto(self._faults.fetch)
            if self._fate is not None and self._faults is not None
            else 0.0
        )

    def _open_source(self, worker: SimulatedWorker, node: str) -> None:
        event = SourceOpened(node=node, rows=self._rows[node])
        worker.after(self._vary(self.timing.load), lambda: self.sent(worker, event))

    def _vary(self, seconds: float) -> float:
        return seconds * self.times.lognormvariate(0.0, self.timing.tail)

    # --- instructions -----------------------------------------------------------------------------

    def _say(self, instructions: Sequence[Instruction]) -> None:
        for number, instruction in enumerate(instructions):
            self.history.instructions.append((self.clock.now, instruction))
            match instruction:
                case Checkpoint():
                    self._begin_to_store(instruction, instructions[number + 1 :])
                    return
                case Finish():
                    self.finish = instruction
                    for step in [step for step in self.history.samples if step > self._closed]:
                        del self.history.samples[step]
                case Rollback():
                    self.gone_back = instruction
                case Respawn():
                    for name in instruction.workers:
                        self._respawn(name)
                case StepClosed():
                    self._closed = instruction.step
                case Warn():
                    pass  # history has it
                case _:
                    self._tell(instruction)

    def _tell(self, instruction: ToWorker) -> None:
        worker = self._workers[instruction.worker]
        if not worker.opened:
            raise RunError(
                f"worker {worker.name} was told something before it was open: {instruction}"
            )
        self._send(worker, instruction)

    def _send(self, worker: SimulatedWorker, message: ToWorker | Asked) -> None:
        if self._fate is None:
            worker.obey(message)
            return
        number, worker.told = worker.told, worker.told + 1
        for seconds in self._fate.arrivals():
            worker.after(seconds, partial(self._deliver, worker, number, message))

    def _deliver(self, worker: SimulatedWorker, number: int, message: ToWorker | Asked) -> None:
        for each in worker.fence.take(worker.epoch, number, message):
            worker.obey(each)

    # --- files ------------------------------------------------------------------------------------

    def _ask(
        self,
        nodes: Mapping[str, Sequence[str]],
        rows: Mapping[str, Sequence[Gather]],
        then: Callable[[bool], None],
    ) -> None:
        """Ask all these Workers at once to save these nodes, and to read these rows."""

        def send(name: str, number: int) -> None:
            asked = Asked(
                number=number, nodes=tuple(nodes.get(name, ())), rows=tuple(rows.get(name, ()))
            )
            self._send(self._workers[name], asked)

        self.asking.ask(sorted({*nodes, *rows}), send, then)

    def _begin_to_store(self, message: Checkpoint, rest: Sequence[Instruction]) -> None:
        """Every Worker with state writes it, the recorder the rows; then what was to be said with
        it.
        """
        for keys, gather in message.rows.values():
            self.outbox.check_rows(keys, gather)
        rows = {self.plan.recorder: [gather for _, gather in message.rows.values()]}
        self._ask(self._writers, rows, lambda well: self._store(message, rest, well=well))

    def _store(self, message: Checkpoint, rest: Sequence[Instruction], *, well: bool) -> None:
        if well and not self.outbox.absent([gather for _, gather in message.rows.values()]):
            rows = {}
            for name, (keys, gather) in message.rows.items():
                self.outbox.check_rows(keys, gather)
                rows[name] = (keys, self.outbox.versions(gather))
            self.history.stored.append(Stored(message=message, rows=rows))
            self._hear(Checkpointed(step=message.step))
        self._say(rest)

    # --- faults -----------------------------------------------------------------------------------

    def _strike(self) -> None:
        """Whoever is hit now is; never so often that the run would be right to fail."""
        if self._fate is None or self.finish is not None or not self._fate.strikes():
            return
        at_risk = [name for name, w in self._workers.items() if not w.gone and self._hits[name] < 2]
        stateful = [name for name in at_risk if name in self._stateful]
        self._hit(
            self._fate.strike([name for name in at_risk if name not in self._stateful], stateful)
        )

    def _hit(self, blow: Blow | None) -> None:
        if blow is None:
            return
        assert self._faults is not None
        worker, patience = self._workers[blow.worker], self._faults.patience
        if not blow.stopped:
            self.clock.after(blow.after, partial(self._kill, worker))
            return
        self.clock.after(blow.after, partial(worker.stop, blow.stopped))
        self.clock.after(
            blow.after + patience, lambda: self._kill(worker) if worker.stopped else None
        )

    def _kill(self, worker: SimulatedWorker) -> None:
        """The process is gone; what it had sent may still arrive, now or after its death is known."""
        if worker.gone or self._hits[worker.name] >= 2:
            return
        assert self._fate is not None
        assert self._faults is not None
        self._hits[worker.name] += 1
        self.deaths += 1
        worker.die()
        event = WorkerLost(worker=worker.name, epoch=worker.epoch, error="killed")
        self.clock.after(self._fate.upto(self._faults.detect), partial(self._lost, worker, event))

    def _lost(self, worker: SimulatedWorker, event: WorkerLost) -> None:
        self.asking.lost(worker.name)
        self.asking.in_turn(partial(self._heard_of_loss, worker, event))

    def _heard_of_loss(self, worker: SimulatedWorker, event: WorkerLost) -> None:
        self._heard[worker.name].close()
        self._hear(event)

    def _respawn(self, name: str) -> None:
        assert self._fate is not None
        assert self._faults is not None
        worker = self._workers[name] = SimulatedWorker(self, name, self._workers[name].epoch + 1)
        self.asking.respawned(name)
        worker.after(self._fate.upto(self._faults.respawn), partial(self._open, worker))
        if self._hits[name] < 2:
            self._hit(self._fate.strike_again(name))

    def _open(self, worker: SimulatedWorker) -> None:
        worker.opened = True
        self.sent(worker, WorkerOpened(worker=worker.name, epoch=worker.epoch))
        for node in self.plan.nodes:
            if node.work == "source" and worker.name in node.workers:
                self._open_source(worker, node.name)
