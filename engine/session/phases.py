"""A run: one phase after another, in one folder. A graph alone is one phase.

    a phase begins with                          found in
    the weights that Models were left with       checkpoints/step_N of the Step at which the phase
                                                 that changed them ended (a boundary)
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
from dataflow.errors import CheckpointError, RunError, nearest
from dataflow.graph import Phase
from dataflow.program import phase_label
from engine.keep.checkpoint.store import CheckpointStore, StoredCheckpoint
from engine.keep.metrics.metric_lines import recorded_rows
from engine.keep.run_folder import RunFolder
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.plan.program_plan import AnyPlan
from engine.session.attempts import Result, RunFrame, StepHooks, has_passed, run_phase
from engine.session.run_beginning import Beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a run stands. number: of the phase, from 1. boundaries: the Steps of the run at which
    those before it ended. checkpoint: within the phase; None at its start.
    """

    number: int = 1
    boundaries: tuple[int, ...] = ()
    checkpoint: StoredCheckpoint | None = None

    def after(self, step: int) -> Standing:
        """The next phase's start."""
        return Standing(number=self.number + 1, boundaries=(*self.boundaries, step))


def run_phases(
    planned: AnyPlan,
    options: RunOptions,
    folder: RunFolder,
    hooks: StepHooks,
    begins: Beginning,
) -> Result:
    """Run every phase from where `begins` says to the end. Raises what a kernel raised, RunError,
    also for a phase whose Steps lack the metric of its threshold, or KeyboardInterrupt if a signal
    ends the run at once.
    """
    place, best = find_place(planned, folder, begins.checkpoint), {}
    with ExitStack() as stack:
        frame = RunFrame(planned.phases, options, folder, stack, notice=begins.notice)
        for warning in planned.warnings:
            frame.log.warn(warning)
        while True:
            plan = begun(planned, place, folder)
            phase_options = replace(options, steps=phase_steps(planned, place.number, options))
            phase_hooks = replace(hooks, threshold=phase_of(planned, place.number).until)
            start = replace(begins, checkpoint=place.checkpoint)
            result, is_through = run_phase(frame, plan, phase_options, folder, phase_hooks, start)
            best |= result.best
            if not is_through or place.number == len(planned.phases):
                return _whole(result, best, plan, frame)
            _require_seen(planned, place, folder)
            place = place.after(result.step)


def _whole(
    result: Result, best: Mapping[str, tuple[Path, ...]], plan: Plan, frame: RunFrame
) -> Result:
    """How the run ended, with what all of its phases left."""
    if plan.phase is None:  # one phase, and no time between two in which a signal could come
        return result
    trained = {name: Path(path) for name, path in plan.phase.left.items()} | dict(result.trained)
    number = frame.signals.number
    reason = frame.signals.reason if number else result.reason
    return replace(result, trained=trained, best=dict(best), signal=number, reason=reason)


def phase_of(planned: AnyPlan, number: int) -> Phase:
    """A phase as it was written, counted from 1; also that of a graph alone."""
    assert planned.program is not None
    return planned.program.phases[number - 1]


def phase_steps(planned: AnyPlan, number: int, options: RunOptions) -> int | None:
    """The Steps of a phase. Those of the options are for a graph alone: a Program refuses them."""
    steps = phase_of(planned, number).steps
    return options.steps if steps is None else steps


def find_place(
    planned: AnyPlan, folder: RunFolder, checkpoint: StoredCheckpoint | None
) -> Standing:
    """The place of a checkpoint: within its phase, or the start of the next one if it had ended."""
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
    """The phase that a manifest names, and where those before it ended."""
    number, boundaries = checkpoint.meta.get("phase"), checkpoint.meta.get("boundaries")
    if isinstance(number, int) and isinstance(boundaries, list) and 1 <= number <= phases:
        steps = tuple(step for step in boundaries if isinstance(step, int))
        if len(steps) == len(boundaries) == number - 1:
            return number, steps
    found = f"found phase {number!r:.20} after {boundaries!r:.60}"
    problem = (
        f"{checkpoint.path}: expected a phase of {phases}, and where the others ended, {found}"
    )
    raise CheckpointError(f"{problem}. Fix: resume the Program that made it.")


def begun(planned: AnyPlan, place: Standing, folder: RunFolder) -> Plan:
    """The phase's plan, with the directories that its Models begin with; all of them are intact.
    Raises CheckpointError if one is not. A graph alone begins with its bases.
    """
    plan = planned.phases[place.number - 1]
    if plan.phase is None:
        return plan
    left = planned.left[place.number - 1]
    store = CheckpointStore(folder.checkpoints, pinned=place.boundaries)
    used = sorted({place.boundaries[weights.phase - 1] for weights in left.values()})
    stored = {step: store.read(step).path.absolute() for step in used}

    def directory(weights: Carried) -> str:
        of = planned.phases[weights.phase - 1]
        return str(stored[place.boundaries[weights.phase - 1]] / _folder_of(of, weights.model))

    optimizers = phase_of(planned, place.number).optimizers
    writers = {m.writer: plan.phase.carried[m.name] for m in plan.models if m.name in optimizers}
    phase = replace(
        plan.phase,
        boundaries=place.boundaries,
        pinned=tuple(sorted({*used, *place.boundaries[-1:]})),
        starts={name: directory(weights) for name, weights in plan.phase.carried.items()},
        states={writer: directory(weights) for writer, weights in writers.items()},
        left={n: directory(weights) for n, weights in left.items() if weights.model == n},
    )
    return replace(plan, phase=phase)


def _folder_of(plan: Plan, model: str) -> str:
    """Where a checkpoint of this phase has a Model's weights (run/loop/checkpoint_files.py)."""
    writer = next(m.writer for m in plan.models if m.name == model)
    return writer or f"followers/{model}"


def _require_seen(planned: AnyPlan, place: Standing, folder: RunFolder) -> None:
    """Raise RunError if no Step of a phase had the metric of its threshold: a misspelt name would
    only be a phase that is longer than it was meant to be.
    """
    phase = phase_of(planned, place.number)
    threshold = phase.until
    if threshold is None:
        return
    rows = recorded_rows(folder.metrics)
    names = {name for row in rows if row.get("phase") == place.number for name in row}
    if threshold.metric in names:
        return
    label, metric = phase_label(place.number, phase), threshold.metric
    near = nearest(metric, sorted(names)) or f"a metric of {folder.metrics}"
    problem = f"{label}: its threshold is of {metric!r}, and no Step of it had that metric"
    raise RunError(f"{problem}. Fix: until=Threshold({near!r}, ...).")
