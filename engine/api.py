"""Check, plan, run as Python calls, for the command line and for notebooks.

Owns: the calls, and what a run folder keeps of one. Does not own: a run's course (attempts.py).

    result = run(my_graph("path/to/model", "prompts.parquet"), RunOptions(steps=100))
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import pyarrow as pa

from dataflow.check import CheckedGraph, CheckedProgram, check
from dataflow.errors import GraphError, PlanError, RunError
from dataflow.graph import Graph
from dataflow.importing import import_from
from dataflow.program import Phase, Program
from dataflow.program_snapshot import identity, read
from dataflow.scripts import kept
from dataflow.settings import edited
from dataflow.snapshot import fingerprint
from engine import options as run_options
from engine.attempts import OnStep, Result, StepHooks, attempts
from engine.background import RunHandle, refuse_second
from engine.checkpoint.edits import edits
from engine.checkpoint.layouts import layout_changes
from engine.checkpoint.provenance import ProvenanceDifference, ProvenanceRecord, provenance
from engine.checkpoint.safe import telling_what_is_safe
from engine.checkpoint.store import CheckpointStore, StoredCheckpoint
from engine.cost.devices import CPU
from engine.cost.profile import Profile, read_profile
from engine.finished import finished
from engine.observe.ended import EndRecord
from engine.observe.runfolder import RunFolder
from engine.options import RunOptions
from engine.peek import first_rows, phase_with
from engine.phases import place_of, run_phases
from engine.plan.cluster import Cluster
from engine.plan.cluster_file import read_cluster
from engine.plan.elastic import elastic, least
from engine.plan.explain import explain
from engine.plan.placing import on_hosts
from engine.plan.plan import Plan
from engine.plan.planner import make_plan
from engine.plan.program_plan import ProgramPlan, make_program_plan
from engine.received import OPTIONS, reading
from engine.record.place import require_known
from engine.resuming import Beginning, WantedRun, beginning, keep_changes
from engine.run.early_end import Until
from engine.tried_edit import TriedEdit

if TYPE_CHECKING:
    from engine.rerun.compared import Rerun

__all__ = ["Result", "RunHandle", "Until", "peek", "plan", "rerun", "resume", "run"]

Runnable = Graph | CheckedGraph | Program | CheckedProgram


@overload
def plan(
    graph: Graph | CheckedGraph,
    options: RunOptions | None = None,
    *,
    profile: Path | None = None,
    cluster: Cluster | None = None,
    simulated: bool = False,
) -> Plan: ...
@overload
def plan(
    graph: Program | CheckedProgram,
    options: RunOptions | None = None,
    *,
    profile: Path | None = None,
    cluster: Cluster | None = None,
    simulated: bool = False,
) -> ProgramPlan: ...
@overload
def plan(
    graph: Runnable,
    options: RunOptions | None = None,
    *,
    profile: Path | None = None,
    cluster: Cluster | None = None,
    simulated: bool = False,
) -> Plan | ProgramPlan: ...
def plan(
    graph: Runnable,
    options: RunOptions | None = None,
    *,
    profile: Path | None = None,
    cluster: Cluster | None = None,
    simulated: bool = False,
) -> Plan | ProgramPlan:
    """Check and plan a graph, or every phase of a Program. profile: a file of `dataflow profile`,
    by whose rates seconds are predicted. cluster: hosts in the place of those that the options
    name. simulated: nothing of it is going to run. Raises GraphError (with options.strict, for
    warnings), PlanError.
    """
    options = options or RunOptions()
    checked = check(graph) if isinstance(graph, Graph | Program) else graph
    placing = replace(run_options.placing(options), simulated=simulated)
    cluster = cluster or _cluster(options, _source(checked))
    if cluster is not None:
        placing, cluster = on_hosts(placing, cluster)
    told: dict[str, Any] = {"seed": options.seed, "threads": options.threads}
    told |= {"placing": placing, "cluster": cluster}
    told["profile"] = None if profile is None else _profile(profile, cluster)
    if isinstance(checked, CheckedProgram):
        _refuse_steps(options)
        planned = make_program_plan(checked, **told)
    else:
        planned = make_plan(checked, **told)
    require_known(planned.phases if isinstance(planned, ProgramPlan) else [planned], options.record)
    if options.strict and planned.warnings:
        raise GraphError(planned.warnings)
    return _identified(planned, _source(checked))


def _cluster(options: RunOptions, source: Graph | Program) -> Cluster | None:
    """The hosts that a plan may use; None for this one alone."""
    if options.cluster in (None, run_options.HERE) or options.inproc:
        return None
    if not run_options.on_ray(options):
        return read_cluster(Path(options.cluster))
    from engine.ray_nodes import ray_cluster  # here: Ray is not needed on one host

    return ray_cluster(options, source)


def _profile(path: Path, cluster: Cluster | None) -> Profile:
    """Of this machine; for a cluster file, of a kind of device that it names. Raises PlanError."""
    if cluster is None or cluster.live:
        return read_profile(path)
    profile = read_profile(path, here=False)
    kinds = {host.kind or CPU for host in cluster.hosts}
    if profile.device.name not in kinds:
        problem = f"expected one of {', '.join(sorted(kinds))}, found {profile.device.name}"
        raise PlanError(
            f"profile {path}: {problem}. Fix: measure it: dataflow profile GRAPH there."
        )
    return profile


def _refuse_file(options: RunOptions) -> None:
    """A cluster file tells of hosts, and starts nothing on them."""
    if options.cluster not in (None, run_options.HERE) and not run_options.on_ray(options):
        problem = f"a run takes ray or ray:local, found {options.cluster!r}, which is for explain"
        raise PlanError(f"options: --cluster: {problem}. Fix: --cluster ray.")


def _refuse_steps(options: RunOptions) -> None:
    if options.steps is not None:
        problem = f"a Program's phases have Steps of their own, found steps={options.steps}"
        raise PlanError(f"options: --steps: {problem}. Fix: (graph, {options.steps}) in it.")


@overload
def run(
    graph: Runnable,
    options: RunOptions | None = None,
    *,
    on_step: Sequence[OnStep] = (),
    until: Until | None = None,
    wait: Literal[True] = True,
) -> Result: ...
@overload
def run(
    graph: Runnable,
    options: RunOptions | None = None,
    *,
    on_step: Sequence[OnStep] = (),
    until: Until | None = None,
    wait: Literal[False],
) -> RunHandle: ...
def run(
    graph: Runnable,
    options: RunOptions | None = None,
    *,
    on_step: Sequence[OnStep] = (),
    until: Until | None = None,
    wait: bool = True,
) -> Result | RunHandle:
    """Run a graph, or a Program, from its beginning. on_step: called with each Step's metrics, and
    again after the run went back to its last checkpoint. until: ends the run when it returns True.
    wait: for its end; else the run goes on in a thread, and its handle is returned.

    Raises GraphError, PlanError, DataError before anything starts; KernelError or RunError if the
    run fails; StorageError, which says what is safe, if a file cannot be written.
    """
    refuse_second()
    options = options or RunOptions()
    _refuse_file(options)
    source = _source(graph)
    planned = plan(graph, options)
    name = options.name or planned.graph
    hooks = StepHooks(on_step=on_step, until=until)
    text, script, notice = kept(source)
    record = ProvenanceRecord(made_of=provenance(source, script=script.module))
    begins = Beginning(record=record, notice=notice)
    with telling_what_is_safe(Path(options.runs) / name, made=False):
        folder = RunFolder.create(name, options.runs, overwrite=options.overwrite)
    go = partial(_begun, planned, text, options, folder, begins)
    if wait:
        return go(hooks)
    handle = RunHandle(folder.path, hooks.requests, _elastic(planned))
    handle.start(partial(go, replace(hooks, on_step=(handle.follow, *on_step))))
    return handle


def _begun(
    planned: Plan | ProgramPlan,
    text: str,
    options: RunOptions,
    folder: RunFolder,
    begins: Beginning,
    hooks: StepHooks,
) -> Result:
    """A run in its new folder, from its records to its end. text: of graph.json. Closes it."""
    with telling_what_is_safe(folder.path), folder, EndRecord(folder) as end:
        folder.write_text("graph.json", text)
        folder.write_text("plan.json", planned.to_json())
        folder.write_text("plan.txt", explain(planned))
        folder.write_text(OPTIONS, run_options.to_json(options, path=_import_path()))
        result = _through(planned, options, folder, hooks, begins)
        end.tell(result.reason, interrupted=result.interrupted)
    return result


def _elastic(planned: Plan | ProgramPlan) -> dict[str, tuple[int, int]]:
    """The least and most replicas of the nodes whose replicas come and go."""
    plans = planned.phases if isinstance(planned, ProgramPlan) else [planned]
    found = ((each, node) for each in plans for node in elastic(each))
    return {node.name: (least(each, node), len(node.workers)) for each, node in found}


def _source(graph: Runnable) -> Graph | Program:
    """What the user wrote."""
    if isinstance(graph, CheckedGraph):
        return graph.graph
    return graph.program if isinstance(graph, CheckedProgram) else graph


def _identified(planned: Plan | ProgramPlan, source: Graph | Program) -> Plan | ProgramPlan:
    """The plan with digests that another process computes, too."""
    if isinstance(planned, Plan):
        return replace(planned, digest=identity(source))
    of = [replace(p, digest=fingerprint(s.graph)) for p, s in _paired(planned)]
    return replace(planned, phases=tuple(of))


def _paired(planned: ProgramPlan) -> Iterable[tuple[Plan, Phase]]:
    return zip(planned.phases, planned.program.phases, strict=True)


def _through(
    planned: Plan | ProgramPlan,
    options: RunOptions,
    folder: RunFolder,
    hooks: StepHooks,
    begins: Beginning,
) -> Result:
    if isinstance(planned, Plan):
        return attempts(planned, options, folder, hooks, begins)
    return run_phases(planned, options, folder, hooks, begins)


def resume(
    folder: Path | str,
    *,
    graph: Graph | Program | None = None,
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
    run_options.require_changeable(changes)
    with telling_what_is_safe(path), RunFolder.open_existing(path) as opened:
        told = _recorded(path / OPTIONS)
        options, imports = run_options.from_json(told, changes, str(path / OPTIONS))
        _refuse_file(options)
        import_from(imports)
        recorded = _recorded(path / "graph.json")
        with reading(path / "graph.json"):
            was = graph or read(recorded, str(path / "graph.json"))
            again = edited(was, settings) if settings else was
            checked = check(again)
        planned = plan(checked, options)
        latest = CheckpointStore(opened.checkpoints, keep=options.keep).latest()
        done = finished(planned, options, opened, latest)
        text, script, notice = kept(again)
        wanted = WantedRun(
            made_of=provenance(again, script=script.module),
            graph=identity(again),
            accept=accept_changes,
            edits=edits(was, again),
            layouts=_layouts(opened, planned),
            ended=_ended(planned, opened, latest),
        )
        begins = beginning(opened, latest, wanted)
        if done is not None:
            return done
        edit = " ".join(settings) or ("another graph" if graph is not None else "")
        with TriedEdit(opened, edit) as tried:
            keep_changes(opened, begins)
            if edit:
                opened.write_text("graph.json", text)
            hooks = StepHooks(on_step=(tried.hold, *on_step), until=until)
            begins = replace(begins, notice=notice)
            return _went_on(planned, options, opened, hooks, begins)


def _went_on(
    planned: Plan | ProgramPlan,
    options: RunOptions,
    folder: RunFolder,
    hooks: StepHooks,
    begins: Beginning,
) -> Result:
    """A run in its old folder, from its records to its end."""
    folder.write_text(OPTIONS, run_options.to_json(options, path=_import_path()))
    folder.write_text("plan.json", planned.to_json())
    folder.write_text("plan.txt", explain(planned))
    with EndRecord(folder) as end:
        result = _through(planned, options, folder, hooks, begins)
        end.tell(result.reason, interrupted=result.interrupted)
    return result


def _layouts(folder: RunFolder, planned: Plan | ProgramPlan) -> list[ProvenanceDifference]:
    """What the run does otherwise than it did, so that its last bits may differ."""
    recorded = folder.path / "plan.json"
    if not recorded.is_file():
        return []
    return layout_changes(recorded.read_text(encoding="utf-8", errors="replace"), planned.to_json())


def _ended(planned: Plan | ProgramPlan, folder: RunFolder, latest: StoredCheckpoint | None) -> int:
    """How many phases are over."""
    if isinstance(planned, Plan) or latest is None:
        return 0
    return place_of(planned, folder, latest).number - 1


def peek(
    graph: Graph | Program, node: str, rows: int = 4, options: RunOptions | None = None
) -> pa.Table:
    """The first rows of a node's output, running only what it needs, with every Model at its base.
    Of a Program: `rollout`, or `PHASE/rollout` or `2/rollout` where several phases have the name.
    It all runs in this process, by kernels that can share it. Raises GraphError.
    """
    if isinstance(graph, Program):
        graph, node = phase_with(graph, node)
    graph.node(node)  # raises with the names that there are
    here = run_options.on_this_host(options or RunOptions())
    return first_rows(plan(graph, here), node, rows)


def rerun(
    folder: Path | str,
    nodes: Sequence[str],
    step: int,
    *,
    graph: Graph | None = None,
    settings: Sequence[str] = (),
) -> Rerun:
    """Run these nodes of a Step of a recorded run again, in this process, and compare what comes of
    it with the record. graph: for a run whose functions cannot be imported (a lambda, a
    notebook's). settings: parameters with other values. Raises RunError for rows that it needs and
    that were not recorded, and what a kernel raises.
    """
    from engine.rerun.compared import rerun as again  # here: it imports what runs kernels

    return again(folder, nodes, step, plan, graph=graph, settings=settings)


def _import_path() -> list[str]:
    """Folders outside the installation from which this process, and a resume, imports."""
    installed = tuple({sys.prefix, sys.base_prefix})
    folders = [os.path.abspath(p) for p in sys.path if p]
    return [folder for folder in folders if not folder.startswith(installed)]


def _recorded(path: Path) -> str:
    if not path.is_file():
        fix = "run again with overwrite"
        raise RunError(f"{path}: the run was killed before it was written. Fix: {fix}.")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fix = "restore the file, or start another run"
        raise RunError(f"{path}: cannot be read: {error}. Fix: {fix}.") from error
