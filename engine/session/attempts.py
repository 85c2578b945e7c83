"""A run as attempts: Workers, coordinator and loop, started again where state was lost.

    an attempt ends by                                   then
    Finish                                               the run is over
    Rollback: state is lost that only checkpoints have   the next attempt, from the last of them
    Relayout: another layout is better now               the same, with another plan (phases.py)

Owns: what an attempt is made of, where it begins, and how many may fail to get further. Does not
own: any of the parts. `resume` is a first attempt that begins at a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dataflow.errors import RunError
from dataflow.graph import Threshold
from dataflow.memory_limits import MemoryLimits
from dataflow.storage import writing
from engine.coordinator.coordinator import Coordinator, Settings
from engine.keep.checkpoint.disk_space import warn_of_room
from engine.keep.checkpoint.provenance import ProvenanceRecord
from engine.keep.checkpoint.safe_state import what_is_safe
from engine.keep.checkpoint.store import CheckpointStore, StoredCheckpoint
from engine.keep.flow.background_records import fold_meanwhile
from engine.keep.flow.fold import FlowFold
from engine.keep.flow.writer import FlowWriter
from engine.keep.memory_file import MemoryRecord, find_lowered, read_memory
from engine.keep.metrics.metric_lines import recorded_row
from engine.keep.metrics.sinks import JsonLines, TensorBoard, View, Wandb
from engine.keep.metrics.step_accounts import RunMetrics
from engine.keep.part_record import PartRecord
from engine.keep.record.run_recording import record_run
from engine.keep.record.stored_rows import settle_rows
from engine.keep.run_folder import RunFolder
from engine.keep.samples import SampleWriter
from engine.keep.trace.timeline import Trace
from engine.keep.worker_logs import log_to_file
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.protocol.events import EventStream, Opened, StepEnded, at_each_step
from engine.protocol.messages import Finish, Relayout, Rollback, StopRequested
from engine.protocol.workers import Workers
from engine.run.loop.checkpoint_files import DiskStore
from engine.run.loop.early_end import EarlyEnd, Until, describe_threshold
from engine.run.loop.loop import Loop
from engine.run.loop.probes import Probes
from engine.run.loop.run_requests import RunRequests
from engine.run.loop.signals import StopSignals
from engine.run.loop.silent_end import no_silent_end
from engine.run.loop.watchdog import Watchdog, named_hang
from engine.session.closing import close_at_end
from engine.session.layouts import RunLayouts
from engine.session.progress import Progress
from engine.session.run_beginning import Beginning
from engine.session.run_log import RunLog
from engine.session.run_result import Result
from engine.session.settled_memory import settled_memory
from engine.session.silent_failures import watch_silent_failures
from engine.session.weight_folders import best_versions, trained_folders

_log = logging.getLogger(__name__)

FRUITLESS = 3
"""Attempts in a row without a further Step, after which the run fails."""

OnStep = Callable[[Mapping[str, float]], None]
"""Called with each Step's row: `step`, then its metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHooks:
    """What is called with each Step's row, and ends the run. threshold: what ends its phase.
    requests: wishes of whoever started it.
    """

    on_step: Sequence[OnStep] = ()
    until: Until | None = None
    threshold: Threshold | None = None
    requests: RunRequests = field(default_factory=RunRequests)


class RunFrame:
    """What lasts as long as a run, whatever its phases: signals, the process's log, what is said
    once.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        options: RunOptions,
        folder: RunFolder,
        stack: ExitStack,
        *,
        notice: str = "",
    ) -> None:
        """stack: ended with the run. notice: said at once, if there is one."""
        # Absolute, as a user's function may go to another folder.
        what_is_safe_now = partial(what_is_safe, folder.path.absolute(), shown=folder.path)
        self.signals = stack.enter_context(StopSignals(options.grace, what_is_safe_now))
        stack.enter_context(no_silent_end(what_is_safe_now))
        log_name = "coordinator"
        only_workers = {_only_worker(plan) for plan in plans}
        if len(only_workers) == 1:
            log_name = only_workers.pop() or log_name
        stack.enter_context(log_to_file(folder.log(log_name)))
        self.log = RunLog(strict=options.strict)
        if notice:
            _log.warning("%s", notice)


def run_phase(
    frame: RunFrame,
    plan: Plan,
    options: RunOptions,
    folder: RunFolder,
    hooks: StepHooks,
    begins: Beginning,
    layouts: RunLayouts | None = None,
) -> tuple[Result, bool] | Relayout:
    """Run a phase, or a graph alone, to its end, in as many attempts as it takes; the first begins
    as `begins` says. Also returns whether the phase came to its end, not only the run. layouts:
    among which the run may switch: it then ends with a Relayout. Raises what a kernel raised,
    RunError, or KeyboardInterrupt if a signal ends the run at once.
    """
    with ExitStack() as stack:
        run = _Run(frame, plan, options, folder, hooks, stack, layouts)
        latest = begins.checkpoint
        furthest, fruitless = plan.first, 0
        while True:
            end = run.attempt(latest, begins.record)
            if isinstance(end, Relayout):
                return end
            if isinstance(end, Finish):
                return run.result(end), run.is_through(end)
            if latest is not None:
                furthest = max(furthest, latest.step)
            fruitless += not run.has_lowered
            if run.step > furthest:
                fruitless = 0
                furthest = run.step
            if fruitless == FRUITLESS:
                problem = f"{FRUITLESS} attempts in a row came no further than step {furthest}"
                raise RunError(f"{problem}: {end.error}")
            cause = _why(end).partition("\n")[0]
            _log.warning("going back to the last checkpoint, as %s", cause)
            latest = run.latest()


class _Run:
    """What the attempts of one run, or phase, share, and where the last one ended: its last Step's
    row.
    """

    def __init__(
        self,
        frame: RunFrame,
        plan: Plan,
        options: RunOptions,
        folder: RunFolder,
        hooks: StepHooks,
        stack: ExitStack,
        layouts: RunLayouts | None,
    ) -> None:
        """stack: ended with the run, or phase."""
        self._plan = plan
        self._layouts = layouts
        self._options = options
        self._folder = folder
        self._hooks = hooks
        pinned: tuple[int, ...] = ()
        if plan.phase is not None:
            pinned = plan.phase.pinned
        self.store = CheckpointStore(folder.checkpoints, keep=options.keep, pinned=pinned)
        self._best = best_versions(plan, folder)
        self.step = plan.first
        self._metrics: Mapping[str, float] = {}
        self._stored_at: float | None = None
        self._limits: Mapping[str, MemoryLimits] = find_lowered(plan, read_memory(folder.path))
        self.has_lowered = False
        """Whether memory ran out in the last attempt, so that the next one takes less at once."""
        self._stopped: StopRequested | None = None
        self._signals = frame.signals
        self._log = frame.log
        for warning in plan.warnings:
            self._log.warn(warning)
        warn_of_room(plan, folder.checkpoints, options)
        self._trace = stack.enter_context(close_at_end(_open_trace(plan, folder)))
        self._on_step = [at_each_step(on_step, first=1) for on_step in hooks.on_step]
        if options.progress:
            progress = stack.enter_context(_make_progress(plan, options))
            self._on_step.append(at_each_step(progress.update))

    def attempt(
        self, latest: StoredCheckpoint | None, record: ProvenanceRecord
    ) -> Finish | Rollback | Relayout:
        """Run once, from this checkpoint or from the beginning, until the run is over, has to go
        back, or goes on with another layout.
        """
        plan = self._plan
        begun = latest.step if latest else plan.first
        hooks = self._hooks
        early = EarlyEnd(self._signals, hooks.until, hooks.threshold, requests=hooks.requests)
        if latest is not None and has_passed(hooks.threshold, self._folder, latest.step):
            early.pass_at_once()
        with ExitStack() as stack:
            part_record = PartRecord(plan, self._folder.parts, after=begun)
            stack.callback(part_record.close)
            coordinator = Coordinator(plan, self._settings(part_record))
            recording = record_run(plan, self._folder, self._options, begun, stack)
            workers = self._open_workers(stack)
            lines = self._open_lines(begun, stack)
            stream = EventStream(self._log, self._trace, Probes(plan.seed))
            metrics = RunMetrics(
                plan.workers,
                lines,
                stream,
                first=plan.first,
                phase=plan.phase_number,
                evaluates=self._options.steps == 0,
            )
            stream.add(metrics)
            for view in self._open_views(stack):
                stream.add(view)
            for on_step in self._on_step:
                stream.on(on_step, StepEnded)
            steps = self._options.steps
            stream.add(watch_silent_failures(plan, self._folder.samples, stream, steps))
            stream.add(early)
            stream.on(stack.enter_context(settled_memory()), Opened)
            stream.add(recording)
            stream.add(MemoryRecord(plan, self._folder))
            stream.add(part_record)
            if self._layouts is not None:
                stream.add(self._layouts)
            stream.add(self._fold_flow(coordinator, workers, begun, stack))
            store = DiskStore(
                plan,
                self.store,
                self._best,
                latest,
                record,
                keep_every=self._options.keep_every,
                on_rows=recording.know,
            )
            loop = Loop(coordinator, workers, store, stream, early)
            watchdog = stack.enter_context(self._make_watchdog(workers, coordinator, loop))
            _log.info("%s begins after step %d", plan.graph, begun)
            with named_hang(watchdog):
                end = loop.run()
            self._stored_at = coordinator.checkpoints.at
            self.has_lowered = coordinator.lowered_limits != self._limits
            self._limits = coordinator.lowered_limits
            self._stopped = early.heard
        self.step = max(0, lines.last)
        self._metrics = metrics.last or self._metrics
        _log.info("%s ended at step %d: %s", plan.graph, self.step, _why(end))
        return end

    def result(self, finish: Finish) -> Result:
        """Say how the run ended. Deletes samples of a Step that never closed, as its recorder
        died.
        """
        SampleWriter(self._folder.samples).truncate_after(self.step)
        settle_rows(self._folder.recorded, self._plan, told_before=True)
        last = self.store.latest()
        trained: dict[str, Path] = {}
        if last is not None:
            trained = trained_folders(self._plan, last.path)
        signal = 0
        stopped = self._stopped
        # A run that was stopped may come to its own end first; that is what the reason says then.
        if stopped is not None and stopped.reason == finish.reason:
            signal = stopped.signal
        return Result(
            folder=self._folder.path,
            reason=finish.reason,
            step=self.step,
            metrics=self._metrics,
            checkpoint=last.path if last else None,
            trained=trained,
            best=self._best.paths(),
            signal=signal,
        )

    def latest(self) -> StoredCheckpoint | None:
        """Find the newest intact checkpoint of this run, or phase."""
        newest = self.store.latest()
        return newest if newest is not None and newest.step > self._plan.first else None

    def is_through(self, finish: Finish) -> bool:
        """Whether this phase came to its end, and was not stopped on its way."""
        if self._signals.is_stop_requested or self._hooks.requests.stopping:
            return False
        threshold = self._hooks.threshold
        if threshold is not None and finish.reason == describe_threshold(threshold):
            return True
        return self._stopped is None or self._stopped.reason != finish.reason

    def _settings(self, part_record: PartRecord) -> Settings:
        return Settings(
            steps=self._options.steps,
            checkpoint_every=self._options.checkpoint_every,
            keep_every=self._options.keep_every,
            checkpoint_seconds=self._options.checkpoint_minutes * 60.0,
            stored_at=self._stored_at,
            error_budget=self._options.error_budget,
            patience=self._options.watchdog,
            grace=self._options.grace,
            scaling=self._options.scaling,
            measures_loads=self._options.loads == "measured",
            parts=part_record.parts(),
            relayout=self._layouts and self._layouts.policy,
            limits=self._limits,
        )

    def _open_workers(self, stack: ExitStack) -> Workers:
        """Make one Worker in this process, or several processes; imports only what these need."""
        plan, folder, options = self._plan, self._folder, self._options
        if plan.hosts:
            from engine.run.hosts.hosts import HostsWorkers

            return stack.enter_context(close_at_end(HostsWorkers(plan, folder, options)))
        name = _only_worker(plan)
        if not name:
            from engine.run.launch.supervisor import Supervisor

            return stack.enter_context(close_at_end(Supervisor(plan, folder, options)))
        from engine.run.launch.worker_assembly import one_worker

        worker = one_worker(name, plan, folder, options, stack)
        return stack.enter_context(close_at_end(worker))

    def _make_watchdog(self, workers: Workers, coordinator: Coordinator, loop: Loop) -> Watchdog:
        """Make the watchdog, which prints every Worker's work, and who waits for whom."""

        def describe() -> str:
            lines: list[str] = []
            for each in workers.doing():
                if each.node:
                    place = coordinator.plan.place(each.node)
                    lines.append(f"{each.worker} is in {place} ({each.what})")
            return "\n  ".join([*lines, *coordinator.waiting(), *workers.stacks()])

        def sign() -> object:
            return loop.heard, workers.doing()

        return Watchdog(self._options.watchdog, describe, sign, self._signals)

    def _open_lines(self, step: int, stack: ExitStack) -> JsonLines:
        """Open the metrics file; drops lines, samples and best versions of Steps that come
        again.
        """
        lines = stack.enter_context(close_at_end(JsonLines()))
        lines.open(self._folder, _config(self._plan, self._options))
        lines.truncate_after(step or -1)  # Step 0 has a row in a run of no Steps
        with writing(f"what is kept up to step {step}", self._folder.path):
            SampleWriter(self._folder.samples).truncate_after(step)
            self._best.truncate_after(step)
        return lines

    def _fold_flow(
        self, coordinator: Coordinator, workers: Workers, begun: int, stack: ExitStack
    ) -> FlowFold:
        """Note what flows, for whoever looks at the run's folder."""
        writer = FlowWriter(self._folder.events, after=begun)
        stack.callback(writer.close)
        asked = (coordinator.cuts, coordinator.progress)
        flow = FlowFold(self._plan, writer, *asked, begun=begun, phase=self._plan.phase_number)
        stack.enter_context(fold_meanwhile(flow, workers.doing, workers.live_reports))
        return flow

    def _open_views(self, stack: ExitStack) -> list[View]:
        kinds = {"tensorboard": TensorBoard, "wandb": Wandb}
        views = [View(name, kinds[name]()) for name in self._options.sinks]
        for view in views:
            stack.callback(view.close)
            view.open(self._folder, _config(self._plan, self._options))
        return views


def _only_worker(plan: Plan) -> str:
    """Name the one Worker, which is this process; empty where there are several, or other hosts."""
    if len(plan.workers) == 1 and not plan.hosts:
        return plan.workers[0]
    return ""


def has_passed(threshold: Threshold | None, folder: RunFolder, step: int) -> bool:
    """Whether a Step's line in the metrics meets what ends its phase."""
    return threshold is not None and threshold.reached(recorded_row(folder.metrics, step))


def _open_trace(plan: Plan, folder: RunFolder) -> Trace:
    """Begin a timeline; a resumed run adds one to those that are there."""
    number = len(list(folder.trace.glob("*.json")))
    file_name, title = f"run_{number}", "dataflow"
    if plan.phase is not None:
        file_name += f"_phase_{plan.phase_number}"
        title += f", {plan.phase.title}"
    return Trace(folder.trace / f"{file_name}.json", process=title, first=plan.first)


def _config(plan: Plan, options: RunOptions) -> dict[str, Any]:
    name = plan.phase.program if plan.phase else plan.graph
    return {"graph": name, "seed": options.seed}


def _make_progress(plan: Plan, options: RunOptions) -> Progress:
    """Make the display, of which a phase shows only its own Steps."""
    title, label = plan.graph, ""
    steps = options.steps
    if steps is not None:
        steps += plan.first
    if plan.phase is not None:
        title = plan.phase.program
        label = f"phase {plan.phase.number}/{plan.phase.count} {plan.graph}"
    return Progress(
        steps,
        title=title,
        phase=label,
        first=plan.first,
        every=options.log_every,
        lag=any(source.max_lag for source in plan.sources),
    )


def _why(end: Finish | Rollback | Relayout) -> str:
    """Say why an attempt ended."""
    if isinstance(end, Finish | Relayout):
        return end.reason
    return f"Worker {end.worker} was lost: {end.error}"
