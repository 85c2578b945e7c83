"""A run: one phase after another, in one folder. A graph alone is one phase.

    a phase begins with                          found in
    the weights that Models were left with       checkpoints/step_N of the Step at which the phase
                                                 that changed them ended (a boundary); of an adapter
                                                 that a Model no longer has, checkpoints/merged
    optimizers that go on                        the same
    everything else                              nowhere: it begins anew

Owns: which phase a run is in, where each begins, what it hands to the next. Does not own: a phase's
course (attempts.py), its plan (plan/program_plan.py), whose weights go where (dataflow/program.py).

Nothing is written between two phases, so a kill there leaves the boundary, from which the next one
begins. Boundaries whose weights are in use are pinned: other checkpoints come and go.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from dataflow.carried_weights import Carried
from dataflow.errors import CheckpointError, DataflowError, RunError, StorageError, nearest
from dataflow.graph import Phase
from dataflow.program import phase_label
from engine.keep.checkpoint.store import CheckpointStore, StoredCheckpoint
from engine.keep.metrics.metric_lines import recorded_rows
from engine.keep.run_folder import RunFolder
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.plan.program_plan import AnyPlan
from engine.protocol.messages import Relayout
from engine.session.attempts import RunFrame, StepHooks, has_passed, run_phase
from engine.session.layouts import PlannedRun, tell_layouts
from engine.session.merged_beginnings import merge_beginnings
from engine.session.run_beginning import Beginning
from engine.session.run_result import Result
from engine.session.weight_folders import weights_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a run stands. number: of the phase, from 1. boundaries: the Steps of the run at which
    those before it ended. checkpoint: within the phase; None at its start.
    """

    number: int = 1
    boundaries: tuple[int, ...] = ()
    checkpoint: StoredCheckpoint | None = None

    def after(self, step: int) -> Standing:
        """Go to the start of the next phase, as this one ended with this Step."""
        return Standing(number=self.number + 1, boundaries=(*self.boundaries, step))


def run_phases(
    planned_run: PlannedRun,
    folder: RunFolder,
    hooks: StepHooks,
    begins: Beginning,
) -> Result:
    """Run every phase from where `begins` says to the end. Raises what a kernel raised, RunError,
    also for a phase whose Steps lack the metric of its threshold, or KeyboardInterrupt if a signal
    ends the run at once.
    """
    planned, options = planned_run.present.planned, planned_run.present.options
    layouts = planned_run.layouts
    place = find_place(planned, folder, begins.checkpoint)
    best: dict[str, tuple[Path, ...]] = {}
    with ExitStack() as stack:
        frame = RunFrame(planned_run.plans, options, folder, stack, notice=begins.notice)
        for warning in planned.warnings:
            frame.log.warn(warning)
        tell_layouts(planned_run)
        while True:
            plan = begin_phase(planned, place, folder)
            try:
                phase_end: tuple[Result, bool] | Relayout = run_phase(
                    frame,
                    plan,
                    replace(options, steps=phase_steps(planned, place.number, options)),
                    folder,
                    replace(hooks, threshold=phase_of(planned, place.number).until),
                    replace(begins, checkpoint=place.checkpoint),
                    layouts,
                )
            except DataflowError as error:
                # A disk that is full is no fault of a layout.
                if layouts is None or not layouts.is_opening or isinstance(error, StorageError):
                    raise
                phase_end = layouts.give_up(error)
            if isinstance(phase_end, Relayout):
                assert layouts is not None
                begins = layouts.switch(phase_end, folder, begins)
                planned, options = layouts.present.planned, layouts.present.options
                place = replace(place, checkpoint=begins.checkpoint)
                continue
            phase_result, is_through = phase_end
            best |= phase_result.best
            if not is_through or place.number == len(planned.phases):
                return _complete(phase_result, best, plan, frame)
            _require_seen(planned, place, folder)
            place = place.after(phase_result.step)


def _complete(
    last: Result, best: Mapping[str, tuple[Path, ...]], plan: Plan, frame: RunFrame
) -> Result:
    """Complete the result of the last phase that ran with what those before it left."""
    if plan.phase is None:  # one phase, and no time between two in which a signal could come
        return last
    earlier = {name: Path(path) for name, path in plan.phase.left.items()}
    signal = frame.signals.number
    reason = last.reason
    if signal:
        reason = frame.signals.reason
    trained = earlier | dict(last.trained)
    return replace(last, trained=trained, best=dict(best), signal=signal, reason=reason)


def phase_of(planned: AnyPlan, number: int) -> Phase:
    """Look up a phase as it was written, counted from 1; also that of a graph alone."""
    assert planned.program is not None
    return planned.program.phases[number - 1]


def phase_steps(planned: AnyPlan, number: int, options: RunOptions) -> int | None:
    """Count the Steps of a phase; None where the data decides. Those of the options are for a graph
    alone: a Program refuses them.
    """
    steps = phase_of(planned, number).steps
    if steps is None:
        return options.steps
    return steps


def find_place(
    planned: AnyPlan, folder: RunFolder, checkpoint: StoredCheckpoint | None
) -> Standing:
    """Find the place of a checkpoint: within its phase, or the start of the next one if its phase
    had ended.
    """
    if checkpoint is None:
        return Standing()
    if planned.phases[0].phase is None:  # the manifests of a graph alone name no phase
        return Standing(checkpoint=checkpoint)
    number, boundaries = _read_place(checkpoint, len(planned.phases))
    place = Standing(number=number, boundaries=boundaries, checkpoint=checkpoint)
    if number == len(planned.phases):
        return place
    phase = phase_of(planned, number)
    first = boundaries[-1] if boundaries else 0
    done = phase.steps is not None and checkpoint.step - first >= phase.steps
    if not (done or has_passed(phase.until, folder, checkpoint.step)):
        return place
    _require_seen(planned, place, folder)
    return place.after(checkpoint.step)


def _read_place(checkpoint: StoredCheckpoint, phases: int) -> tuple[int, tuple[int, ...]]:
    """Read which phase a manifest names, and where those before it ended. Raises CheckpointError
    for one that does not fit the Program.
    """
    number = checkpoint.meta.get("phase")
    boundaries = checkpoint.meta.get("boundaries")
    if isinstance(number, int) and isinstance(boundaries, list) and 1 <= number <= phases:
        steps = tuple(step for step in boundaries if isinstance(step, int))
        if len(steps) == len(boundaries) == number - 1:
            return number, steps
    expected = f"expected a phase of {phases}, and where the others ended"
    problem = f"{expected}, found phase {number!r:.20} after {boundaries!r:.60}"
    fix = "resume the Program that made it"
    raise CheckpointError(f"{checkpoint.path}: {problem}. Fix: {fix}.")


def begin_phase(planned: AnyPlan, place: Standing, folder: RunFolder) -> Plan:
    """Add to the phase's plan the directories that its Models begin with, which are all intact.
    Raises CheckpointError if one is not, RunError if an adapter cannot be merged for a Model that
    has none. A graph alone begins with its bases.
    """
    plan = planned.phases[place.number - 1]
    if plan.phase is None:
        return plan
    left = planned.left[place.number - 1]
    store = CheckpointStore(folder.checkpoints, pinned=place.boundaries)
    used_steps = sorted({place.boundaries[weights.phase - 1] for weights in left.values()})
    checkpoints = {step: store.read(step).path.absolute() for step in used_steps}

    def find_directory(weights: Carried) -> str:
        """Where the phase that changed them left these weights."""
        checkpoint = checkpoints[place.boundaries[weights.phase - 1]]
        return str(checkpoint / weights_folder(planned.phases[weights.phase - 1], weights.model))

    carried = plan.phase.carried
    optimizers = phase_of(planned, place.number).optimizers
    states: dict[str, str] = {}
    for model in plan.models:
        if model.name in optimizers:
            states[model.writer] = find_directory(carried[model.name])
    left_directories: dict[str, str] = {}
    for name, weights in left.items():
        if weights.model == name:
            left_directories[name] = find_directory(weights)
    assert plan.program is not None
    starts = {name: find_directory(weights) for name, weights in carried.items()}
    phase = replace(
        plan.phase,
        boundaries=place.boundaries,
        pinned=tuple(sorted({*used_steps, *place.boundaries[-1:]})),
        starts=merge_beginnings(plan.program, starts, folder.checkpoints),
        states=states,
        left=left_directories,
    )
    return replace(plan, phase=phase)


def _require_seen(planned: AnyPlan, place: Standing, folder: RunFolder) -> None:
    """Raise RunError if no Step of a phase had the metric of its threshold: a misspelt name would
    only be a phase that is longer than it was meant to be.
    """
    phase = phase_of(planned, place.number)
    threshold = phase.until
    if threshold is None:
        return
    metric = threshold.metric
    names: set[str] = set()
    for row in recorded_rows(folder.metrics):
        if row.get("phase") == place.number:
            names.update(row)
    if metric in names:
        return
    label = phase_label(place.number, phase)
    near = nearest(metric, sorted(names)) or f"a metric of {folder.metrics}"
    problem = f"{label}: its threshold is of {metric!r}, and no Step of it had that metric"
    raise RunError(f"{problem}. Fix: until=Threshold({near!r}, ...).")
