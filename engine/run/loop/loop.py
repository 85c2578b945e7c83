"""The loop: carries instructions to the Workers and events to the coordinator.

    waits for                               unblocked by
    the next event of some Worker           that Worker
    answers about files (ask)               the Workers asked

What has come meanwhile is handled together where that makes no difference (`Coordinator.groups`),
so that the cost of an event falls as more of them wait.

Owns: the order of all that happens. Does not own: any decision (coordinator), any kernel
(engine/run/worker), where Workers are (engine/run/launch, engine/simulation), where files
lie (checkpoint_files.py), nor what is made of it (subscribers to its events,
engine/protocol/events.py).

What is the loop's own (StepClosed, PartFormed, Warn, LimitLowered, Checkpoint, Respawn, Retire,
Rollback, Relayout, Finish) is carried out as soon as it is said. When no Worker has anything to do,
no event comes any more and the coordinator has not finished, nothing will ever happen again: that
is an error that says who waits for whom.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from dataflow.errors import RunError
from engine.coordinator.coordinator import GROUPABLE, Coordinator
from engine.protocol import events as e
from engine.protocol import messages as m
from engine.protocol.workers import WorkerGone, Workers
from engine.run.loop.checkpoint_files import RunStore

_TICK = 0.2
"""Seconds after which the loop sees a Ctrl-C although no event has come."""

_LATE_TICKS = 50
"""Ticks (10 s) for which a run in which nobody has anything to do waits for an event: a process
whose sockets are closed, so that its peers know, may take some seconds to end.
"""

TOGETHER = 256
"""Messages that are taken at most before the loop looks at anything else."""

_MEASURED_EVERY = 1.0
"""Seconds between two looks at what Workers have measured, where no Step ends meanwhile."""


M = TypeVar("M", m.Checkpoint, m.Evaluated)
End = m.Finish | m.Rollback | m.Relayout
"""How an attempt ends."""


class Loop:
    """One attempt at a run: from its beginning, or from a checkpoint of the store.

    events: who is told of what happens. stop: asked at each turn whether the run is to end early,
    to write a checkpoint, or to have other replicas, and answers each wish once. clock: seconds; a
    simulated one where the Workers are. together: so many messages at most are handled together; 1:
    each alone.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        workers: Workers,
        store: RunStore,
        events: e.EventStream,
        stop: Callable[[], m.Wish | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        together: int = TOGETHER,
    ) -> None:
        self._coordinator = coordinator
        self._workers = workers
        self._store = store
        self._events = events
        self._stop = stop
        self._clock = clock
        self._together = together
        self._end: End | None = None
        self._measured = clock()
        self.heard = 0
        """Events that were heard: while it grows, something moves."""
        self.untold: list[m.Instruction] = []
        """What was said after the end, and not carried out."""

    def run(self) -> End:
        """Until the coordinator finishes, or says that the run has to go on from its last
        checkpoint, as something is lost or with another layout.

        Raises RunError where the run fails or where nothing can move any more, and what a kernel
        raised.
        """
        try:
            opened = list(self._workers.open())
            restored = self._store.restore(self._workers)
        except WorkerGone as gone:
            return m.Rollback(worker=gone.worker, error=str(gone))
        self._carry_out(self._coordinator.start(restored))
        for event in opened:
            self._hear((event,))
        self._measure()
        self._events.emit(e.Opened(at=self._clock()))
        while self._end is None:
            self._turn()
        self._measure()
        if isinstance(self._end, m.Finish):
            if self._end.error:
                raise RunError(self._end.error)
            self._store.prune()
        return self._end

    def _turn(self) -> None:
        """Hear that the run is to end early, or the next event."""
        if self._stops():
            return
        event = self._workers.next(_TICK)
        if event is None and not self._workers.busy:
            event = self._await_late_event()
        if event is not None:
            for batch in self._take_batches(event):
                self._hear(batch)
        elif self._coordinator.moving:  # nothing has moved, so that the watchdog is not told
            self._carry_out(self._coordinator.handle(m.TimePassed(), self._clock()))
        if self._clock() - self._measured >= _MEASURED_EVERY:
            self._measure()

    def _await_late_event(self) -> m.Event | m.From | None:
        """Take what still comes although no Worker is busy. None: the run is to end early. Raises
        RunError where nothing comes: nothing will ever happen again.
        """
        for _ in range(_LATE_TICKS):
            event = self._workers.next_while_idle(_TICK)
            if event is not None or self._stops():
                return event
        raise RunError(self._describe_starvation())

    def _stops(self) -> bool:
        asked = self._stop()
        if asked is not None:
            self._hear((asked,))
        return asked is not None

    def _take_batches(self, first: m.Event | m.From) -> Iterator[list[m.Event | m.From]]:
        """A message and what has come behind it by now, in batches; a batch is taken once the one
        before it is handled.
        """
        batch = [first]
        for _ in range(self._together - 1):
            # Nothing is taken beyond a message that is handled alone: what it leads to may be for
            # the Workers to know first, and one in this process works as it is asked for the next.
            if batch and not isinstance(_event_of(batch[-1]), GROUPABLE):
                yield batch
                batch = []
            if self._end is not None:
                return
            message = self._workers.next(0.0)
            if message is None:
                break
            batch.append(message)
        if batch:
            yield batch

    def _hear(self, messages: Sequence[m.Event | m.From]) -> None:
        """Have the coordinator handle these, and carry out what it says to each group of them."""
        for group in self._coordinator.groups(messages, self._together):
            for worker, event in group:
                self.heard += 1
                takers = self._events[type(event)]
                if takers:
                    heard = e.EventHeard(at=self._clock(), event=event, worker=worker)
                    for take in takers:
                        take(heard)
                if isinstance(event, m.Evaluated) and self._end is None:
                    # its version is there until the next Step
                    self._write(event, self._store.keep_best)
            events = [event for _, event in group]
            self._carry_out(self._coordinator.handle_together(events, self._clock()))

    def _carry_out(self, instructions: Iterable[m.Instruction]) -> None:
        """Carry these out in order; but a Step is closed behind the chunks that come next, so that
        Workers go on while its numbers are written.
        """
        closed: list[tuple[m.StepClosed, e.WorkersMeasured]] = []
        for instruction in instructions:
            if not isinstance(instruction, m.RunChunk):
                self._close_steps(closed)
            if isinstance(instruction, m.StepClosed):
                closed.append((instruction, self._take_measured()))
            else:
                self._tell(instruction)
        self._close_steps(closed)

    def _close_steps(self, closed: list[tuple[m.StepClosed, e.WorkersMeasured]]) -> None:
        while closed:
            instruction, measured = closed.pop(0)
            self._events.emit(measured)
            self._tell(instruction)

    def _tell(self, instruction: m.Instruction) -> None:
        if self._end is not None:  # one that was just carried out led to it
            self.untold.append(instruction)
            return
        takers = self._events[type(instruction)]
        if takers:
            event = e.InstructionTold(at=self._clock(), instruction=instruction)
            for take in takers:
                take(event)
        self._carry_out_one(instruction)

    def _carry_out_one(self, instruction: m.Instruction) -> None:
        match instruction:
            case m.StepClosed():
                self._stops()
            case m.Warn() | m.LimitLowered() | m.PartFormed():
                pass  # subscribers show and record it
            case m.Checkpoint():
                if self._write(instruction, self._store.write):
                    self._hear((m.Checkpointed(step=instruction.step),))
            case m.Respawn():
                self._workers.respawn(instruction.workers)
            case m.Retire():
                self._workers.retire(instruction.workers)
            case m.Finish() | m.Rollback() | m.Relayout():
                self._workers.forget()  # what was still to be made is not wanted
                self._end = instruction
            case _:
                self._workers.tell(instruction)

    def _write(self, message: M, write: Callable[[Workers, M], bool]) -> bool:
        """Have files written; whether they were. Where a Worker is lost meanwhile there are none:
        the coordinator hears of the loss, and decides.
        """
        self._measure()
        start = self._clock()
        self._events.emit(e.WritingBegan(of=message, at=start))
        try:
            written = write(self._workers, message)
        except WorkerGone as gone:
            failed = e.WritingFailed(of=message, error=str(gone), at=self._clock())
            self._events.emit(failed)
            return False
        if written:
            end = self._clock()
            self._measure()
            self._events.emit(e.WritingEnded(of=message, start=start, end=end))
        return written

    def _measure(self) -> None:
        """Tell what Workers have measured and done since the last time."""
        self._events.emit(self._take_measured())

    def _take_measured(self) -> e.WorkersMeasured:
        workers = self._workers
        self._measured = self._clock()
        return e.WorkersMeasured(
            at=self._measured,
            reports=workers.reports(),
            spans=workers.spans(),
            doing=workers.doing(),
        )

    def _describe_starvation(self) -> str:
        lines = "\n  ".join(self._coordinator.waiting())
        return f"nothing is under way and the run has not finished; who waits for whom:\n  {lines}"


def _event_of(message: m.Event | m.From) -> m.Event:
    return message.event if isinstance(message, m.From) else message
