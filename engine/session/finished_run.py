"""A run that has done all its Steps: what a resume says of it, without touching its folder.

Owns: whether a checkpoint is the run's last, and its Result. Does not own: how a run ends
(engine/coordinator/course.py), which says the same where this cannot know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dataflow.errors import RunError
from engine.keep.checkpoint.cut import Cut, read_cut
from engine.keep.checkpoint.store import StoredCheckpoint
from engine.keep.metrics.metric_lines import recorded_row
from engine.keep.run_folder import RunFolder
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.plan.program_plan import AnyPlan
from engine.plan.source_rows import rows_in_data
from engine.session.attempts import has_passed
from engine.session.phases import begin_phase, find_place, phase_of, phase_steps
from engine.session.run_result import Result
from engine.session.weight_folders import best_versions, trained_folders

NOTHING = "nothing to do"
"""How the reason of such a Result begins."""


def find_finished(
    planned: AnyPlan,
    options: RunOptions,
    folder: RunFolder,
    latest: StoredCheckpoint | None,
) -> Result | None:
    """Say how the run ended, if its newest checkpoint is its last; None if there is something to
    do, or if only a run can tell. Raises RunError for fewer Steps than are done.
    """
    if latest is None:
        return None
    _require_more(folder, options, latest.step)
    place = find_place(planned, folder, latest)
    if place.checkpoint is None or place.number < len(planned.phases):
        return None
    last = begin_phase(planned, place, folder)
    steps = phase_steps(planned, place.number, options)
    cut = read_cut(latest.path, latest.step)
    cause = ""
    # The phases of a Program alone have thresholds.
    if not has_passed(phase_of(planned, place.number).until, folder, latest.step):
        cause = _why_over(last, steps, cut)
        if not cause:
            return None
    if last.phase is None:
        return _make_result(last, folder, latest, cause)
    cause = f"all {len(planned.phases)} phases are done"
    last_result = _make_result(last, folder, latest, cause)
    earlier = {name: Path(path) for name, path in last.phase.left.items()}
    best: dict[str, tuple[Path, ...]] = {}
    for plan in planned.phases:
        best |= best_versions(plan, folder).paths()
    return replace(last_result, trained=earlier | dict(last_result.trained), best=best)


def _require_more(folder: RunFolder, options: RunOptions, done: int) -> None:
    if options.steps is not None and options.steps < done:
        problem = f"expected {done} or more, as so many steps are done"
        fix = f"--steps {2 * done}; or start another run"
        raise RunError(f"{folder.path}: --steps: {problem}, found {options.steps}. Fix: {fix}.")


def _why_over(plan: Plan, steps: int | None, cut: Cut) -> str:
    """Say why nothing is left after this cut, in words; empty if something is, or may be."""
    done = cut.step - plan.first
    evaluated = cut.evaluated or {}
    for node in plan.nodes:
        if node.work == "evaluate" and evaluated.get(node.name) != done:
            return ""
    if steps is not None:
        if done >= steps:
            return f"all {steps} steps are done"
        return ""
    if any(_is_exhausted(plan, source.name, cut) for source in plan.sources):
        return "the data has ended"
    return ""


def _is_exhausted(plan: Plan, source: str, cut: Cut) -> bool:
    """Whether one pass over a source's data is done; False where that needs reading it."""
    assert plan.program is not None
    progress = cut.sources.get(source)
    if progress is None or progress.running or progress.finished:
        return False
    rows = rows_in_data(plan.program.node(source))
    return rows is not None and progress.next >= rows


def _make_result(plan: Plan, folder: RunFolder, latest: StoredCheckpoint, cause: str) -> Result:
    row = recorded_row(folder.metrics, latest.step)
    metrics: Mapping[str, float] = {
        name: number for name, number in row.items() if number is not None
    }
    return Result(
        folder=folder.path,
        reason=f"{NOTHING}, as {cause}",
        step=latest.step,
        metrics=metrics,
        checkpoint=latest.path,
        trained=trained_folders(plan, latest.path),
        best=best_versions(plan, folder).paths(),
    )
