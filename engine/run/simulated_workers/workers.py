"""The Workers of a simulated run: their messages take time, and they die, stop and restart.

Owns: simulated time, which passes while the loop (engine/run/loop/loop.py) waits; messages on their
way. Does not own: what a Worker does (simulated_worker.py), how long that takes (kernel_times.py),
which Worker is hit when (faults.py).

Without faults all messages take the same time, or none. With them a message is delayed. What a
Worker says may also come twice, out of order, and after its sender's death: numbers put that right
(engine/coordinator/ordered_inbox.py). What it is told comes once and in order, as a socket has it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from dataflow.errors import RunError
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.events import EventHeard, InstructionTold, RunEvent
from engine.protocol.workers import Ask, WorkerGone
from engine.run.simulated_workers.behaviour import Outcomes
from engine.run.simulated_workers.clock import VirtualClock
from engine.run.simulated_workers.cores import SimulatedCores
from engine.run.simulated_workers.faults import Blow, Fate, FaultModel
from engine.run.simulated_workers.file_requests import FileRequest
from engine.run.simulated_workers.groups import Devices, SimulatedRanks
from engine.run.simulated_workers.history import Notes
from engine.run.simulated_workers.kernel_times import KernelTimes, Rows
from engine.run.simulated_workers.outbox import SimulatedOutboxes
from engine.run.simulated_workers.parts import TrainedParts
from engine.run.simulated_workers.shorts import Shorts
from engine.run.simulated_workers.simulated_worker import SimulatedWorker
from engine.run.simulated_workers.spans import NOBODY, SpanLog
from engine.run.simulated_workers.store import SavedRows
from engine.run.simulated_workers.world import RunningWorker


class SimulatedWorkers:
    """See `engine.protocol.workers.Workers`. Its public attributes are the world that its Workers
    share. rows: of each source in one pass. disk: files of rows of the checkpoint to resume from.
    together: the loop is so slow that up to so many messages wait when it takes the first. within:
    so many seconds that it waits for more after the first; below 0, not at all. message: seconds
    that one takes, without faults. log: whether spans are wanted. proving: whether to check that
    all that is told makes sense.
    """

    def __init__(
        self,
        plan: Plan,
        history: Notes,
        *,
        rows: Mapping[str, int],
        kernels: KernelTimes,
        outcomes: Outcomes,
        faults: FaultModel | None = None,
        disk: Mapping[Path, SavedRows] | None = None,
        together: int = 1,
        slow: int = 0,
        within: float = -1.0,
        message: float = 0.0,
        handling: float = 0.0,
        log: bool = False,
        proving: bool = True,
    ) -> None:
        self.plan = plan
        self.nodes = {n.name: n for n in plan.nodes}
        self.history = history
        self.kernels = kernels
        self.proving = proving
        self._together = together
        self._slow = Random(slow)
        self._within = within
        self._message, self._handling = message, handling
        self.outcomes = outcomes
        self.disk: Mapping[Path, SavedRows] = disk or {}
        self.clock = VirtualClock()
        self.cores = SimulatedCores(plan, self.clock, kernels)
        self.log = SpanLog(self.clock) if log else None
        self.outbox = SimulatedOutboxes(outcomes.growth)
        self.groups = SimulatedRanks(plan)
        self.trained_parts = TrainedParts()
        self.shorts = Shorts(plan, faults)
        self.devices = Devices(plan)
        self.deaths = 0
        self._rows = rows
        self._faults = faults or FaultModel()
        self._fate = Fate(faults) if faults is not None else None
        self._workers = {name: SimulatedWorker(self, name, 0) for name in plan.workers}
        for name in plan.spare:  # as if it had ended, and its next epoch is the first
            self._workers[name] = SimulatedWorker(self, name, -1)
            self._workers[name].gone = True
        self.away = set(plan.spare)
        """Workers that are not open now; before the run, those that it begins without."""
        self._present: dict[str, list[tuple[float, float]]] = {name: [] for name in plan.spare}
        self._inbox: deque[m.Event | m.From] = deque()
        """Arrived, and not yet taken by the loop."""
        self._request = 0
        self._answers: dict[str, Any] = {}
        """Answers to the last request, by Worker."""
        self._lost: dict[str, m.WorkerLost] = {}
        """Workers known to be dead and not yet restarted."""
        self._hits = dict.fromkeys(plan.workers, 0)
        """Deaths of each Worker since it last finished something."""
        self.over = False
        self._stateful = plan.stateful

    def open(self) -> Iterator[m.Event | m.From]:
        """Open all at once; what they tell of it comes by `next`."""
        for worker in [w for w in self._workers.values() if not w.gone]:
            self._open(worker)
        return iter(())

    def tell(self, instruction: m.ToWorker) -> None:
        """Raises RunError if the Worker is not open."""
        worker = self._workers[instruction.worker]
        if not worker.opened:
            raise RunError(f"worker {worker.name} was not open yet for {instruction}")
        self._handle()
        if self.log is not None:
            self.log.note_message(instruction)
        self._send(worker, instruction)

    def next(self, timeout: float | None = None) -> m.Event | m.From | None:
        """The next message, after whatever simulated time that takes; None if none will come, or
        with a timeout of 0 if none has.
        """
        if timeout != 0.0:
            messages = 1
            if self._together > 1:
                messages = self._slow.randint(1, self._together)
            while len(self._inbox) < messages and self.clock.step():
                pass
            until = self.clock.now + self._within
            while self.clock.next <= until and self.clock.step():
                pass
        if not self._inbox:
            return None
        message = self._inbox.popleft()
        self._handle()
        if self.log is not None:
            self.log.set_cause(message)
        return message

    def next_while_idle(self, timeout: float) -> m.Event | m.From | None:
        """None: while anything is still to happen the Workers are busy."""
        del timeout
        return None

    def _handle(self) -> None:
        """The coordinator computes for a message, on the host of the first Worker."""
        if self._handling:
            self.cores.take(self.plan.workers[0], self._handling)

    @property
    def busy(self) -> bool:
        """Whether anything is still to happen."""
        return bool(self._inbox) or not self.clock.idle

    def ask(self, requests: Mapping[str, Ask]) -> dict[str, Any]:
        """Let time pass until all have answered, or one of them is known to be dead."""
        self._request += 1
        self._answers = {}
        for name in sorted(requests):
            request = FileRequest(number=self._request, request=requests[name])
            self._send(self._workers[name], request)
        while len(self._answers) < len(requests):
            for name in sorted(requests.keys() & self._lost.keys() - self._answers.keys()):
                raise WorkerGone(name, "it was lost while something was asked of it")
            if not self.clock.step():
                missing = ", ".join(requests.keys() - self._answers.keys())
                raise RunError(f"{missing}: no answer to {requests} will come")
            for answer in self._answers.values():
                if isinstance(answer, WorkerGone):
                    raise answer
        return self._answers

    def forget(self) -> None:
        """Do nothing: Workers end what they were told, so that every block is released."""

    def respawn(self, workers: Sequence[str]) -> None:
        """They open after some time."""
        for name in workers:
            epoch = self._workers[name].epoch + 1
            worker = self._workers[name] = SimulatedWorker(self, name, epoch)
            self._lost.pop(name, None)
            span = NOBODY if self.log is None else self.log.starts(name)
            seconds = self.kernels.start(name) + self._upto(self._faults.respawn)
            worker.after(seconds, partial(self._open, worker, span))
            self._present.setdefault(name, []).append((self.clock.now, math.inf))
            if self._fate is not None and self._hits[name] < 2:
                self._hit(self._fate.strike_again(name))

    def retire(self, workers: Sequence[str]) -> None:
        """They end at once. What one had sent may still arrive."""
        for name in workers:
            self._lost.pop(name, None)
            if not self._workers[name].gone:
                self._workers[name].die()
                self._leaves(name)

    def _leaves(self, worker: str) -> None:
        """It is there no more, from now on."""
        times = self._present.setdefault(worker, [])
        begun = times.pop()[0] if times else 0.0
        times.append((begun, self.clock.now))
        self.away.add(worker)

    @property
    def present(self) -> dict[str, tuple[tuple[float, float], ...]]:
        """From when to when each Worker was there that began or ended during the run."""
        return {worker: tuple(times) for worker, times in self._present.items()}

    def reports(self) -> list[Any]:
        """Nothing: simulated Workers are not measured or watched."""
        return []

    spans = doing = stacks = live_reports = reports

    def close(self) -> None:
        """There are no processes."""

    def say(self, worker: RunningWorker, event: m.Event, span: int = NOBODY) -> None:
        """A Worker says something, within a span."""
        if self.log is not None:
            self.log.note_event(event, span)
        if self._fate is None and self._message:
            self.clock.after(self._message, partial(self._inbox.append, event))
            return
        if self._fate is None:
            self._inbox.append(event)
            return
        message = m.From(
            worker=worker.name, epoch=worker.epoch, number=worker.events_sent, event=event
        )
        worker.events_sent += 1
        for seconds in self._fate.arrivals():
            self.clock.after(seconds, partial(self._arrive, message))

    def answer(self, worker: str, number: int, answer: Any) -> None:
        """A Worker answers a request; ignored if that was given up."""
        if number == self._request:
            self._answers[worker] = answer

    def fetching(
        self, message: Rows | m.FetchAhead, here: frozenset[tuple[str, int]] = frozenset()
    ) -> float:
        """How long a fetch takes. here: blocks (worker, number) whose rows have been fetched."""
        return self.kernels.fetch(message, here) + self._upto(self._faults.fetch)

    def _open(self, worker: SimulatedWorker, span: int = NOBODY) -> None:
        worker.opened = True
        self.away.discard(worker.name)
        if self.log is not None and span != NOBODY:
            self.log.end(span)
        self.say(worker, m.WorkerOpened(worker=worker.name, epoch=worker.epoch), span)
        for node in self.plan.nodes:
            if node.work == "source" and worker.name in node.workers:
                event = m.SourceOpened(node=node.name, rows=self._rows[node.name])
                worker.after(self.kernels.open(), partial(self.say, worker, event))

    def _arrive(self, message: m.From) -> None:
        self._inbox.append(message)
        self._strike()
        if self._fate is not None and not self.over:
            self._inbox.extend(self._fate.moves(self.plan))

    def _send(self, worker: SimulatedWorker, message: m.ToWorker | FileRequest) -> None:
        if self._fate is None:
            worker.obey(message)
            return
        # A socket to one incarnation keeps the order: whenever one has to arrive, the first does.
        worker.under_way.append(message)
        worker.after(self._fate.delay(), partial(self._deliver, worker))

    def _deliver(self, worker: SimulatedWorker) -> None:
        worker.obey(worker.under_way.popleft())

    takes = (m.ChunkDone, m.Recorded, m.Evaluated, m.Finish)

    def take(self, event: RunEvent) -> None:
        """See `engine.protocol.events`. Hears who has finished something, and the end of faults."""
        match event:
            case EventHeard(event=m.ChunkDone() | m.Recorded() | m.Evaluated()) if event.worker:
                # 1 for a Worker that has died since: its loss is reported later
                self._hits[event.worker] = int(self._workers[event.worker].gone)
            case InstructionTold(instruction=m.Finish()):
                self.over = True

    def _upto(self, seconds: float) -> float:
        """A time of at most so many seconds; none without faults."""
        if self._fate is None:
            return 0.0
        return self._fate.upto(seconds)

    def _strike(self) -> None:
        """Perhaps hit a Worker, but never so often that the run may rightly fail."""
        if self._fate is None or self.over or not self._fate.strikes():
            return
        at_risk = [n for n, w in self._workers.items() if not w.gone and self._hits[n] < 2]
        stateful = [name for name in at_risk if name in self._stateful]
        stateless = [name for name in at_risk if name not in self._stateful]
        self._hit(self._fate.strike(stateless, stateful))

    def _hit(self, blow: Blow | None) -> None:
        if blow is None:
            return
        worker, patience = self._workers[blow.worker], self._faults.patience
        if not blow.stopped:
            self.clock.after(blow.after, partial(self._kill, worker))
            return

        def give_up() -> None:
            if worker.is_stopped:
                self._kill(worker)

        self.clock.after(blow.after, partial(worker.stop, blow.stopped))
        self.clock.after(blow.after + patience, give_up)

    def end_short(self, worker: str) -> None:
        """A Worker ends that has said that it is short; that death does not count."""
        short = self._workers[worker]
        short.die()
        # A process that ends by itself has sent what it said: it is heard before its end.
        seconds = self._faults.delay + self._upto(self._faults.detect)
        self.clock.after(seconds, partial(self._find_lost, short))

    def _kill(self, worker: SimulatedWorker) -> None:
        """The process dies; what it had sent may still arrive, even after its death is known."""
        if worker.gone or self._hits[worker.name] >= 2:
            return
        self._hits[worker.name] += 1
        self.deaths += 1
        worker.die()
        self.clock.after(self._upto(self._faults.detect), partial(self._find_lost, worker))

    def _find_lost(self, worker: SimulatedWorker) -> None:
        if self._workers[worker.name] is not worker:  # it was replaced meanwhile
            return
        event = m.WorkerLost(worker=worker.name, epoch=worker.epoch, error="killed")
        self._lost[worker.name] = event
        self._inbox.append(event)
