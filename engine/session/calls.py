"""Run, resume and peek as Python calls, for the command line and for notebooks.

Owns: the calls, and what a run folder keeps of one. Does not own: planning (planning.py), a run's
course (attempts.py). Users import them from engine/api.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import pyarrow as pa

from dataflow.check import check
from dataflow.errors import PlanError, RunError
from dataflow.import_order import import_from
from dataflow.program import AnyGraph
from dataflow.program_snapshot import identity, read
from dataflow.scripts import write_importable_snapshot
from dataflow.set_expressions import edited
from engine.keep.checkpoint.layout_changes import layout_changes
from engine.keep.checkpoint.parameter_edits import parameter_edits
from engine.keep.checkpoint.provenance import ProvenanceDifference, ProvenanceRecord, provenance
from engine.keep.checkpoint.safe_state import telling_what_is_safe
from engine.keep.checkpoint.store import CheckpointStore
from engine.keep.end_record import EndRecord
from engine.keep.run_folder import RunFolder
from engine.keep.untrusted_files import OPTIONS, PROFILE, reading
from engine.plan import options as run_options
from engine.plan.explain import explain
from engine.plan.layout_table import LayoutTable
from engine.plan.options import RunOptions
from engine.plan.program_plan import AnyPlan
from engine.plan.replica_ranges import elastic_nodes, least_replicas
from engine.run.loop.early_end import Until
from engine.session.attempts import OnStep, StepHooks
from engine.session.background_run import RunHandle, refuse_second
from engine.session.edit_trial import TriedEdit
from engine.session.finished_run import find_finished
from engine.session.layouts import PlannedRun, plan_resumed, plan_run
from engine.session.node_phase import find_phase
from engine.session.peek import first_rows
from engine.session.phases import find_place, run_phases
from engine.session.planning import Runnable, find_layouts, plan, source_of
from engine.session.run_beginning import Beginning, WantedRun, find_beginning, keep_changes
from engine.session.run_result import Result

__all__ = ["Until", "peek", "resume", "run"]


def _refuse_cluster_file(options: RunOptions) -> None:
    """Raise PlanError for a cluster file: it tells of hosts, and starts nothing on them."""
    if options.cluster not in (None, run_options.HERE) and not run_options.is_on_ray(options):
        problem = f"a run takes ray or ray:local, found {options.cluster!r}, which is for explain"
        raise PlanError(f"options: --cluster: {problem}. Fix: --cluster ray.")


@overload
def run(
    graph: Runnable,
    options: RunOptions | None = None,
    *,
    on_step: Sequence[OnStep] = (),
    until: Until | None = None,
    wait: Literal[True] = True,
    layouts: LayoutTable | None = None,
) -> Result: ...
@overload
def run(
    graph: Runnable,
    options: RunOptions | None = None,
    *,
    on_step: Sequence[OnStep] = (),
    until: Until | None = None,
    wait: Literal[False],
    layouts: LayoutTable | None = None,
) -> RunHandle: ...
def run(
    graph: Runnable,
    options: RunOptions | None = None,
    *,
    on_step: Sequence[OnStep] = (),
    until: Until | None = None,
    wait: bool = True,
    layouts: LayoutTable | None = None,
) -> Result | RunHandle:
    """Run a graph, or a Program, from its beginning. on_step: called with each Step's metrics, and
    again after the run went back to its last checkpoint. until: ends the run when it returns True.
    wait: for its end; else the run goes on in a thread, and its handle is returned. layouts: among
    which it may switch, in the place of those of `options.relayout`.

    Raises GraphError, PlanError, DataError before anything starts; KernelError or RunError if the
    run fails; StorageError, which says what is safe, if a file cannot be written.
    """
    refuse_second()
    options = options or RunOptions()
    _refuse_cluster_file(options)
    source = source_of(graph)
    planned_run = plan_run(
        layouts,
        options,
        lambda changed, memory: plan(graph, changed, memory=memory),
        partial(find_layouts, graph),
    )
    planned = planned_run.present.planned
    name = options.name or planned.graph
    hooks = StepHooks(on_step=on_step, until=until)
    text, script, notice = write_importable_snapshot(source)
    record = ProvenanceRecord(made_of=provenance(source, script=script.module))
    begins = Beginning(record=record, notice=notice)
    with telling_what_is_safe(Path(options.runs) / name, is_made=False):
        folder = RunFolder.create(name, options.runs, overwrite=options.overwrite)
    run_with = partial(_run_new, planned_run, text, folder, begins)
    if wait:
        return run_with(hooks)
    handle = RunHandle(folder.path, hooks.requests, _replica_ranges(planned))
    hooks = replace(hooks, on_step=(handle.follow, *on_step))
    handle.start(partial(run_with, hooks))
    return handle


def _run_new(
    planned_run: PlannedRun,
    text: str,
    folder: RunFolder,
    begins: Beginning,
    hooks: StepHooks,
) -> Result:
    """Run in a new folder, from its records to the end. Closes the folder. text: of graph.json."""
    with telling_what_is_safe(folder.path), folder, EndRecord(folder) as end:
        folder.write_text("graph.json", text)
        _write_plans(planned_run, folder)
        ended_run = run_phases(planned_run, folder, hooks, begins)
        end.tell(ended_run.reason, interrupted=ended_run.interrupted)
    return ended_run


def _write_plans(planned_run: PlannedRun, folder: RunFolder) -> None:
    """Write what the run goes on with: its plan, its own options, its layouts."""
    planned = planned_run.present.planned
    folder.write_text("plan.json", planned.to_json())
    folder.write_text("plan.txt", explain(planned))
    kept_options = run_options.keep_choice(planned_run.options, planned.phases)
    if kept_options.profile is not None:
        folder.write_text(PROFILE, _read_record(kept_options.profile))
        kept_options = replace(kept_options, profile=Path(PROFILE))
    folder.write_text(OPTIONS, run_options.encode_options(kept_options, path=_import_path()))
    if planned_run.layouts is not None:
        planned_run.layouts.write(folder)


def _replica_ranges(planned: AnyPlan) -> dict[str, tuple[int, int]]:
    """List the least and most replicas of the nodes whose replicas come and go."""
    replicas: dict[str, tuple[int, int]] = {}
    for phase in planned.phases:
        for node in elastic_nodes(phase):
            replicas[node.name] = least_replicas(phase, node), len(node.workers)
    return replicas


def resume(
    folder: Path | str,
    *,
    graph: AnyGraph | None = None,
    settings: Sequence[str] = (),
    on_step: Sequence[OnStep] = (),
    until: Until | None = None,
    accept_changes: bool = False,
    **changes: Any,
) -> Result:
    """Go on from a run folder's last checkpoint. settings: parameters with other values from the
    next Step on, such as "train_policy.lr=1e-5". changes: options with new values, such as steps=.
    Where no Step is left to do, nothing in the folder changes.

    A run that was killed before its first checkpoint starts over, and says so. graph: for a run
    whose functions cannot be imported (a lambda, a notebook's). accept_changes: parameters, data,
    models and source files may differ from the next Step on. Whatever changes is recorded, with its
    first Step, in changes.json and every later checkpoint; settings and a graph are taken back
    where an error comes before their first Step has ended. Raises CheckpointError for damaged
    checkpoints, changes that are not accepted, settings that cannot change in a run, and missing
    metrics; RunError if the folder is not a run's.
    """
    refuse_second()
    path = Path(folder)
    run_options.require_resume_options(changes)
    with telling_what_is_safe(path), RunFolder.open_existing(path) as opened:
        options_text = _read_record(path / OPTIONS)
        where = str(path / OPTIONS)
        options, imports = run_options.decode_options(options_text, changes, where, path)
        _refuse_cluster_file(options)
        import_from(imports)
        recorded_graph = _read_record(path / "graph.json")
        with reading(path / "graph.json"):
            before = graph or read(recorded_graph, str(path / "graph.json"))
            after = edited(before, settings) if settings else before
            checked = check(after)
        planned_run = plan_resumed(
            opened,
            options,
            lambda changed, memory: plan(checked, changed, memory=memory),
            partial(find_layouts, checked),
            asks_anew=changes.get("relayout") is not None,
        )
        planned = planned_run.present.planned
        latest = CheckpointStore(opened.checkpoints, keep=options.keep).latest()
        finished_run = find_finished(planned, options, opened, latest)
        text, script, notice = write_importable_snapshot(after)
        wanted = WantedRun(
            made_of=provenance(after, script=script.module),
            graph=identity(after),
            accept=accept_changes,
            edits=parameter_edits(before, after),
            layouts=_find_layout_changes(opened, planned),
            ended=find_place(planned, opened, latest).number - 1,
        )
        # Also where no Step is left: a run that is made of something else is refused all the same.
        begins = find_beginning(opened, latest, wanted)
        if finished_run is not None:
            return finished_run
        edit = " ".join(settings)
        if graph is not None:
            edit = edit or "another graph"
        with TriedEdit(opened, edit) as tried:
            keep_changes(opened, begins)
            if edit:
                opened.write_text("graph.json", text)
            hooks = StepHooks(on_step=(tried.make_final, *on_step), until=until)
            begins = replace(begins, notice=notice)
            return _run_on(planned_run, opened, hooks, begins)


def _run_on(
    planned_run: PlannedRun,
    folder: RunFolder,
    hooks: StepHooks,
    begins: Beginning,
) -> Result:
    """Run on in a folder that there was, from its records to the end."""
    _write_plans(planned_run, folder)
    if planned_run.layouts is not None and begins.checkpoint is not None:
        planned_run.layouts.restore(folder, begins.checkpoint.step)
    with EndRecord(folder) as end:
        ended_run = run_phases(planned_run, folder, hooks, begins)
        end.tell(ended_run.reason, interrupted=ended_run.interrupted)
    return ended_run


def _find_layout_changes(folder: RunFolder, planned: AnyPlan) -> list[ProvenanceDifference]:
    """Find what the run does otherwise than it did, so that its last bits may differ."""
    plan_file = folder.path / "plan.json"
    if not plan_file.is_file():
        return []
    recorded_plan = plan_file.read_text(encoding="utf-8", errors="replace")
    return layout_changes(recorded_plan, planned.to_json())


def peek(graph: AnyGraph, node: str, rows: int = 4, options: RunOptions | None = None) -> pa.Table:
    """Read the first rows of a node's output, running only what it needs, with every Model at its
    base. Of a Program: `rollout`, or `PHASE/rollout` or `2/rollout` where several phases have the
    name. It all runs in this process, by kernels that can share it. Raises GraphError.
    """
    phase, name = find_phase(graph, node)
    here = run_options.on_this_host(options or RunOptions())
    return first_rows(plan(phase, here), name, rows)


def _import_path() -> list[str]:
    """List the folders outside the installation from which this process, and a resume, imports."""
    installed = (sys.prefix, sys.base_prefix)
    folders = [os.path.abspath(entry) for entry in sys.path if entry]
    return [folder for folder in folders if not folder.startswith(installed)]


def _read_record(path: Path) -> str:
    """Read a file that the run's first process wrote. Raises RunError."""
    if not path.is_file():
        fix = "run again with overwrite"
        raise RunError(f"{path}: the run was killed before it was written. Fix: {fix}.")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fix = "restore the file, or start another run"
        raise RunError(f"{path}: cannot be read: {error}. Fix: {fix}.") from error
