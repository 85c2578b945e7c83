"""The loop: carries instructions to the Workers and events to the coordinator.

    waits for                               unblocked by
    the next event of some Worker           that Worker
    answers about files (ask)               the Workers asked

Owns: the Step's metrics, checkpoints and best versions on disk, the stop on Ctrl-C. Does not own:
any decision (coordinator), any kernel (worker.py), where Workers are (inproc.py, engine/launch).

What is the loop's own (StepClosed, Warn, Checkpoint, Respawn, Rollback, Finish) is carried out as
soon as it is said. When no Worker has anything to do, no event is left and the coordinator has not
finished, nothing will ever happen again: that is an error that says who waits for whom.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dataflow.errors import RunError
from engine.checkpoint.best import BestVersions
from engine.checkpoint.provenance import ProvenanceRecord
from engine.checkpoint.store import CheckpointStore
from engine.coordinator.core import Coordinator, Restored
from engine.coordinator.messages import (
    Checkpoint,
    Checkpointed,
    Evaluated,
    Event,
    Finish,
    From,
    Instruction,
    Probed,
    Respawn,
    Rollback,
    StepClosed,
    StopRequested,
    Warn,
    WorkerLost,
)
from engine.observe.accounts import StepAccounts
from engine.observe.sinks import JsonLines, Sink
from engine.observe.trace import Trace
from engine.observe.warned import Warned
from engine.plan.plan import Plan
from engine.run.chunk_metrics import RunReports
from engine.run.files import save_best, write_checkpoint
from engine.run.probes import Probes
from engine.run.stop import Stop
from engine.run.workers import WorkerGone, Workers

_log = logging.getLogger(__name__)

_TICK = 0.2
"""Seconds after which the loop sees a Ctrl-C although no event has come."""

OnStep = Callable[[Mapping[str, float]], None]


@dataclass(slots=True, kw_only=True)
class Observers:
    """Who is told: the metrics file, views of it, a trace, anything that wants each Step's row."""

    lines: JsonLines
    views: Sequence[Sink] = ()
    trace: Trace | None = None
    on_step: Sequence[OnStep] = field(default_factory=tuple)
    until: Callable[[Mapping[str, float]], bool] | None = None
    """Ends the run after the first Step for whose metrics it holds."""
    warned: Warned = field(default_factory=Warned)


@contextmanager
def _settled_memory() -> Iterator[None]:
    """What was made by imports and by opening stays: Python's collector does not walk through it at
    every turn.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Loop:
    """One attempt at a run of a plan: from its beginning, or from a checkpoint."""

    def __init__(
        self,
        plan: Plan,
        coordinator: Coordinator,
        workers: Workers,
        store: CheckpointStore,
        best: BestVersions,
        observers: Observers,
        stop: Stop,
        record: ProvenanceRecord | None = None,
    ) -> None:
        """record: of what the run is made, for its checkpoints."""
        self._plan = plan
        self._coordinator = coordinator
        self._workers = workers
        self._store = store
        self._best = best
        self._observers = observers
        self._stop = stop
        self._record = record
        self._accounts = StepAccounts(plan.workers)
        self._probes = Probes(plan.seed)
        self._reported = RunReports()
        self._told = False
        self._end: Finish | Rollback | None = None
        self.last: dict[str, float] = {}
        self.stopped: StopRequested | None = None
        """Who asked for the end last, a host that others lend among them."""

    def run(self, restore: Callable[[], Restored | None]) -> Finish | Rollback:
        """Until the coordinator finishes, or says that the run has to go back to its last
        checkpoint.

        restore: reads a checkpoint into the opened Workers, or answers None. Raises RunError where
        the run fails or where nothing can move any more, and what a kernel raised.
        """
        try:
            opened = list(self._workers.open())
            restored = restore()
        except WorkerGone as gone:
            return Rollback(worker=gone.worker, error=str(gone))
        with _settled_memory():
            self._begin(opened, restored)
            while self._end is None:
                self._turn()
        return self._ended(self._end)

    def _begin(self, opened: Sequence[Event | From], restored: Restored | None) -> None:
        self._carry_out(self._coordinator.start(restored))
        for event in opened:
            self._hear(event)
        self._drain()
        self._accounts.begin(time.monotonic())

    def _turn(self) -> None:
        """Hear the next event, or a Ctrl-C."""
        if self._stop.requested and not self._told:
            self._told = True
            self._hear(StopRequested(reason=self._stop.reason, signal=self._stop.signals.number))
            return
        event = self._workers.next(_TICK)
        if event is None and not self._workers.busy:
            event = self._workers.next(
                0.0
            )  # one may have come just before the last Worker was done
            if event is None:
                raise RunError(self._starved())
        if event is not None:
            self._hear(event)

    def _hear(self, event: Event | From) -> None:
        self._stop.alive()
        what = event.event if isinstance(event, From) else event
        if isinstance(what, Evaluated):
            self._keep_best(what)
        elif isinstance(what, WorkerLost):
            self._lost(what)
        elif isinstance(what, Probed):
            self._probes.hear(what)
        elif isinstance(what, StopRequested):
            self.stopped = what
        self._accounts.add(self._reported.hear(what), ())
        self._carry_out(self._coordinator.handle(event, time.monotonic()))

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if self._end is not None:  # one that was just carried out led to it
                return
            match instruction:
                case StepClosed():
                    self._close_step(instruction)
                case Warn():
                    self._observers.warned.show(instruction.warning)
                case Checkpoint():
                    self._checkpoint(instruction)
                case Respawn():
                    self._workers.respawn(instruction.workers)
                case Finish() | Rollback():
                    self._workers.forget()  # what was still to be made is not wanted
                    self._end = instruction
                case _:
                    self._workers.tell(instruction)

    def _ended(self, end: Finish | Rollback) -> Finish | Rollback:
        self._drain()
        if isinstance(end, Finish) and end.error:
            raise RunError(end.error)
        if isinstance(end, Finish):
            self._best.prune()
        return end

    def _lost(self, event: WorkerLost) -> None:
        _log.warning("Worker %s was lost: %s", event.worker, event.error)
        if self._observers.trace is not None:
            self._observers.trace.instant(f"{event.worker}/lost", event.error, time.monotonic())

    def _starved(self) -> str:
        lines = "\n  ".join(self._coordinator.waiting())
        return f"nothing is under way and the run has not finished; who waits for whom:\n  {lines}"

    # --- Steps ------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """What Workers have measured and done since the last time."""
        spans = self._workers.spans()
        self._accounts.add(self._workers.reports(), spans)
        if self._observers.trace is not None:
            for track, name, start, end in spans:
                self._observers.trace.span(track, name, start, end)

    def _close_step(self, closed: StepClosed) -> None:
        """One row of metrics. What was measured before Step 1 goes into its row, under
        eval/initial/.
        """
        self._drain()
        self._accounts.add(self._reported.rest(), ())
        again = closed.step == self._observers.lines.last
        row = self._accounts.close(
            closed.step, closed.metrics, time.monotonic(), self._workers.doing(), again=again
        )
        if closed.step > 0:
            self._tell(closed.step, row, again=again)

    def _tell(self, step: int, numbers: Mapping[str, float], *, again: bool) -> None:
        """Write a Step's row. again: it is there, and an evaluation came after it that belongs into
        it.
        """
        lines = self._observers.lines
        if again:
            numbers = lines.amend(step, numbers)
        else:
            lines.write(step, numbers)
        self.last = {"step": step, **numbers}
        for view in self._observers.views:
            view.write(step, numbers)
        for tell in self._observers.on_step:
            tell(self.last)
        until = self._observers.until
        if until is not None and not again and until(self.last):
            self._hear(StopRequested(reason=f"its condition held after step {step}", at_once=True))

    # --- files ------------------------------------------------------------------------------------

    def _checkpoint(self, message: Checkpoint) -> None:
        """Write it; the metrics up to it are on the disk first, and later lines are cut off by a
        resume.

        Where a Worker is lost meanwhile there is none: the coordinator hears of the loss, and
        decides.
        """
        self._drain()
        start = time.monotonic()
        self._accounts.writing(start)
        self._observers.lines.sync()
        try:
            write_checkpoint(self._plan, self._store, self._workers, message, self._record)
        except WorkerGone as gone:
            _log.warning("the checkpoint of step %d was not written: %s", message.step, gone)
            return
        self._best.prune()
        end = time.monotonic()
        self._drain()
        self._accounts.written(end)
        if self._observers.trace is not None:
            self._observers.trace.span("checkpoint", f"step {message.step}", start, end)
            self._observers.trace.flush()
        self._hear(Checkpointed(step=message.step))

    def _keep_best(self, event: Evaluated) -> None:
        """Keep the version that was evaluated where it is among the best; the writer has it until
        the next Step.
        """
        self._drain()
        self._accounts.writing(time.monotonic())
        try:
            kept = save_best(self._plan, self._best, self._workers, event)
        except WorkerGone as gone:
            _log.warning("version %d was not kept among the best: %s", event.version, gone)
            return
        if kept:
            self._drain()
            self._accounts.written(time.monotonic())
