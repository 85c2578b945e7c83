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
from engine.session.attempts import Result, best_versions, has_passed, trained_in
from engine.session.phases import begun, find_place, phase_of, phase_steps

NOTHING = "nothing to do"
"""How the reason of such a Result begins."""


def finished(
    planned: AnyPlan,
    options: RunOptions,
    folder: RunFolder,
    latest: StoredCheckpoint | None,
) -> Result | None:
    """The run's end, if its newest checkpoint is that; None if there is something to do, or if only
    a run can tell. Raises RunError for fewer Steps than are done.
    """
    if latest is None:
        return None
    _require_more(folder, options, latest.step)
    place = find_place(planned, folder, latest)
    if place.checkpoint is None or place.number < len(planned.phases):
        return None
    last = begun(planned, place, folder)
    until = phase_of(planned, place.number).until
    steps = phase_steps(planned, place.number, options)
    cut = read_cut(latest.path, latest.step)
    passed = has_passed(until, folder, latest.step)
    cause = "" if passed else _ended(last, steps, cut)
    if not (passed or cause):
        return None
    if last.phase is None:
        return _result(last, folder, latest, cause)
    result = _result(last, folder, latest, f"all {len(planned.phases)} phases are done")
    earlier = {name: Path(path) for name, path in last.phase.left.items()}
    best: dict[str, tuple[Path, ...]] = {}
    for plan in planned.phases:
        best |= best_versions(plan, folder).paths()
    return replace(result, trained=earlier | dict(result.trained), best=best)


def _require_more(folder: RunFolder, options: RunOptions, done: int) -> None:
    if options.steps is not None and options.steps < done:
        problem = f"expected {done} or more, as so many steps are done"
        fix = f"--steps {2 * done}; or start another run"
        raise RunError(f"{folder.path}: --steps: {problem}, found {options.steps}. Fix: {fix}.")


def _ended(plan: Plan, steps: int | None, cut: Cut) -> str:
    """Why nothing is left after this cut, in words; empty if something is, or may be."""
    done = cut.step - plan.first
    evaluations = [node.name for node in plan.nodes if node.work == "evaluate"]
    if any((cut.evaluated or {}).get(name) != done for name in evaluations):
        return ""
    if steps is not None:
        return f"all {steps} steps are done" if done >= steps else ""
    if any(_is_exhausted(plan, source.name, cut) for source in plan.sources):
        return "the data has ended"
    return ""


def _is_exhausted(plan: Plan, source: str, cut: Cut) -> bool:
    """Whether one pass over a source's data is done; False where that needs reading it."""
    assert plan.program is not None
    node, known = plan.program.node(source), cut.sources.get(source)
    if known is None or known.running or known.finished:
        return False
    rows = rows_in_data(node)
    return rows is not None and known.next >= rows


def _result(plan: Plan, folder: RunFolder, latest: StoredCheckpoint, ended: str) -> Result:
    row = recorded_row(folder.metrics, latest.step)
    metrics: Mapping[str, float] = {name: v for name, v in row.items() if v is not None}
    return Result(
        folder=folder.path,
        reason=f"{NOTHING}, as {ended}",
        step=latest.step,
        metrics=metrics,
        checkpoint=latest.path,
        trained=trained_in(plan, latest.path),
        best=best_versions(plan, folder).paths(),
    )
