"""The loop: carries instructions to the Worker and events to the coordinator.

    waits for                               unblocked by
    an instruction to be carried out        the Worker
    the coordinator's next instructions     the event just handled

Owns: the order of I/O, the Step's metrics, checkpoints on disk, the stop on Ctrl-C, the
watchdog. Does not own: any decision (coordinator), any kernel (worker.py).

Instructions are carried out in the order in which they were given. When none is left and the
coordinator has not finished, nothing will ever happen again: that is an error that says who
waits for whom.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dataflow.errors import RunError
from engine.checkpoint.best import BestVersions
from engine.checkpoint.cut import Cut
from engine.checkpoint.store import CheckpointStore
from engine.coordinator.core import Coordinator, Restored
from engine.coordinator.messages import (
    Checkpoint,
    Checkpointed,
    Evaluate,
    Event,
    Finish,
    Instruction,
    Release,
    RunChunk,
    StepClosed,
    StopRequested,
    TrainStep,
)
from engine.observe.metrics import StepMetrics
from engine.observe.sinks import JsonLines, Sink
from engine.observe.trace import Trace
from engine.plan.plan import Plan
from engine.runtime.stop import Stop
from engine.runtime.worker import Worker

_SUMS = ("time/", "data/rows", "completion/tokens", "train/tokens")
"""Metrics of which a Step's number is the sum of its reports, not their mean."""

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


@contextmanager
def _settled_memory() -> Iterator[None]:
    """What was made by imports and by opening stays: Python's collector does not walk through it at every turn."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Loop:
    """One run of one plan in this process."""

    def __init__(
        self,
        plan: Plan,
        coordinator: Coordinator,
        worker: Worker,
        store: CheckpointStore,
        best: BestVersions,
        observers: Observers,
        stop: Stop,
    ) -> None:
        self._plan = plan
        self._coordinator = coordinator
        self._worker = worker
        self._store = store
        self._best = best
        self._observers = observers
        self._stop = stop
        self._queue: deque[Instruction] = deque()
        self._metrics = StepMetrics()
        self._sums: dict[str, float] = {}
        self._initial: dict[str, float] = {}
        self._since = time.perf_counter()
        self._told = False
        self.last: dict[str, float] = {}
        if observers.trace is not None:
            trace = observers.trace
            worker.span = lambda track, name, start, end: trace.span(f"{worker.name}/{track}", name, start, end)

    def run(self, restore: Callable[[], Restored | None]) -> Finish:
        """Until the coordinator finishes. restore: reads a checkpoint into the opened Worker, or answers None.

        Raises RunError where the run fails or where nothing can move any more.
        """
        opened = list(self._worker.open())
        with _settled_memory():
            return self._run(opened, restore)

    def _run(self, opened: Sequence[Event], restore: Callable[[], Restored | None]) -> Finish:
        self._queue.extend(self._coordinator.start(restore()))
        for event in opened:
            self._hear(event)
        self._drain_reports()
        self._sums.clear()
        self._since = time.perf_counter()
        while True:
            if self._stop.requested and not self._told:
                self._told = True
                self._hear(StopRequested(reason=self._stop.reason))
            if not self._queue:
                raise RunError(self._starved())
            instruction = self._queue.popleft()
            self._stop.alive()
            if isinstance(instruction, Finish):
                return self._finished(instruction)
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Release):
            self._worker.release(instruction.blocks)
        elif isinstance(instruction, StepClosed):
            self._close_step(instruction)
        elif isinstance(instruction, Checkpoint):
            self._checkpoint(instruction)
        else:
            for event in self._worker.execute(instruction):
                self._hear(event)
            self._drain_reports()

    def _hear(self, event: Event) -> None:
        self._stop.alive()
        told = self._coordinator.handle(event, time.perf_counter())
        if any(isinstance(instruction, Finish) for instruction in told):  # what was still to be made is not wanted
            self._queue = deque(i for i in self._queue if not isinstance(i, (RunChunk, TrainStep, Evaluate)))
        self._queue.extend(told)

    def _finished(self, message: Finish) -> Finish:
        if message.error:
            raise RunError(message.error)
        self._best.prune()
        return message

    def _starved(self) -> str:
        lines = "\n  ".join(self._coordinator.waiting())
        return f"nothing is under way and the run has not finished; who waits for whom:\n  {lines}"

    # --- metrics ------------------------------------------------------------------------------------------------

    def _drain_reports(self) -> None:
        for name, value, count in self._worker.reports():
            if name.startswith(_SUMS):
                self._sums[name] = self._sums.get(name, 0.0) + value
            else:
                self._metrics.add(name, value, count)

    def _close_step(self, closed: StepClosed) -> None:
        """One row of metrics. What was measured before Step 1 goes into its row, under eval/initial/."""
        now = time.perf_counter()
        if closed.step == 0:
            self._initial = {
                f"eval/initial/{name.removeprefix('eval/')}": value for name, value in self._evaluated(0).items()
            }
        elif closed.step == self._observers.lines.last:
            self._tell(closed.step, self._evaluated(closed.step), again=True)
        else:
            for name, value in (self._sums | dict(closed.metrics) | self._initial | self._rates(closed, now)).items():
                self._metrics.add(name, value)
            self._initial = {}
            self._tell(closed.step, self._metrics.row(closed.step), again=False)
        self._metrics.clear()
        self._sums.clear()
        self._since = now

    def _evaluated(self, step: int) -> dict[str, float]:
        return {name: value for name, value in self._metrics.row(step).items() if name.startswith("eval/")}

    def _tell(self, step: int, row: Mapping[str, float], *, again: bool) -> None:
        """Write a Step's row. again: it is there, and an evaluation came after it that belongs into it."""
        numbers = {name: value for name, value in row.items() if name != "step"}
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

    def _rates(self, closed: StepClosed, now: float) -> dict[str, float]:
        """Times and rates. time/engine is what passed outside of kernels, checkpoints and sample files."""
        seconds = now - self._since
        inside = sum(value for name, value in self._sums.items() if name.startswith("time/"))
        found = {"time/step": seconds, "time/engine": max(0.0, seconds - inside)}
        rows = self._sums.get("data/rows", closed.metrics.get("data/prompts"))
        tokens = self._sums.get("completion/tokens", self._sums.get("train/tokens"))
        if rows is not None and seconds > 0:
            found["throughput/samples_per_second"] = rows / seconds
        if tokens is not None and seconds > 0:
            found["throughput/tokens_per_second"] = tokens / seconds
        return found

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _checkpoint(self, message: Checkpoint) -> None:
        """Write it; sinks are flushed by their own writes, and their lines after it are cut off by a resume."""
        cut = Cut(step=message.step, seed=self._plan.seed, graph=self._plan.digest, sources=message.sources)

        def fill(directory: Path) -> None:
            (directory / "cut.json").write_bytes(cut.to_json())
            self._worker.save(directory, message)

        start = time.perf_counter()
        self._store.write(message.step, fill, {"graph": self._plan.graph})
        self._best.prune()
        end = time.perf_counter()
        if self._observers.trace is not None:
            self._observers.trace.span(f"{self._worker.name}/checkpoint", f"step {message.step}", start, end)
            self._observers.trace.flush()
        self._worker.reports()  # the kernels' saving is part of it, and not counted twice
        self._sums["time/checkpoint"] = self._sums.get("time/checkpoint", 0.0) + end - start
        self._hear(Checkpointed(step=message.step))
