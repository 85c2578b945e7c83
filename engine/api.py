"""Check, plan, run as Python calls, for the command line and for notebooks.

Owns: the calls, and what a run folder keeps of one. Does not own: a run's course (attempts.py).

    result = run(my_graph("path/to/model", "prompts.parquet"), RunOptions(steps=100))
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import pyarrow as pa

from dataflow.check import CheckedGraph, CheckedProgram, check
from dataflow.errors import GraphError, PlanError, RunError
from dataflow.graph import Graph
from dataflow.importing import import_from
from dataflow.program import Phase, Program
from dataflow.program_snapshot import identity, read, written
from dataflow.snapshot import fingerprint
from engine import options as run_options
from engine.attempts import OnStep, Result, StepHooks, attempts
from engine.checkpoint.provenance import ProvenanceRecord, provenance
from engine.checkpoint.safe import telling_what_is_safe
from engine.checkpoint.store import CheckpointStore
from engine.observe.runfolder import RunFolder
from engine.options import RunOptions
from engine.peek import first_rows, phase_with
from engine.phases import run_phases
from engine.plan.cluster import read_cluster
from engine.plan.explain import explain
from engine.plan.plan import Plan
from engine.plan.planner import make_plan
from engine.plan.program_plan import ProgramPlan, make_program_plan
from engine.received import reading
from engine.resuming import Beginning, beginning
from engine.run.early_end import Until

__all__ = ["Result", "Until", "peek", "plan", "resume", "run"]

OPTIONS = "options.json"
Runnable = Graph | CheckedGraph | Program | CheckedProgram


@overload
def plan(graph: Graph | CheckedGraph, options: RunOptions | None = None) -> Plan: ...
@overload
def plan(graph: Program | CheckedProgram, options: RunOptions | None = None) -> ProgramPlan: ...
@overload
def plan(graph: Runnable, options: RunOptions | None = None) -> Plan | ProgramPlan: ...
def plan(graph: Runnable, options: RunOptions | None = None) -> Plan | ProgramPlan:
    """Check and plan a graph, or every phase of a Program. Raises GraphError (with options.strict,
    for warnings), PlanError.
    """
    options = options or RunOptions()
    checked = check(graph) if isinstance(graph, Graph | Program) else graph
    placing = run_options.placing(options)
    cluster = None
    if options.cluster is not None:
        from engine.launch.hosts import known  # not needed on one host

        cluster = known(read_cluster(options.cluster), frozenset(placing.hosts.values()))
    told: dict[str, Any] = {"seed": options.seed, "threads": options.threads}
    told |= {"placing": placing, "cluster": cluster}
    if isinstance(checked, CheckedProgram):
        _refuse_steps(options)
        planned = make_program_plan(checked, **told)
    else:
        planned = make_plan(checked, **told)
    if options.strict and planned.warnings:
        raise GraphError(planned.warnings)
    return planned


def _refuse_steps(options: RunOptions) -> None:
    if options.steps is not None:
        problem = f"a Program's phases have Steps of their own, found steps={options.steps}"
        raise PlanError(f"options: --steps: {problem}. Fix: (graph, {options.steps}) in it.")


def run(
    graph: Runnable,
    options: RunOptions | None = None,
    *,
    on_step: Sequence[OnStep] = (),
    until: Until | None = None,
) -> Result:
    """Run a graph, or a Program, from its beginning. on_step: called with each Step's metrics, and
    again after the run went back to its last checkpoint. until: ends the run when it returns True.

    Raises GraphError, PlanError, DataError before anything starts; KernelError or RunError if the
    run fails; StorageError, which says what is safe, if a file cannot be written.
    """
    options = options or RunOptions()
    source = _source(graph)
    planned = _identified(plan(graph, options), source)
    name = options.name or planned.graph
    with (
        telling_what_is_safe(Path(options.runs) / name),
        RunFolder.create(name, options.runs, overwrite=options.overwrite) as folder,
    ):
        folder.write_text("graph.json", written(source))
        folder.write_text("plan.json", planned.to_json())
        folder.write_text("plan.txt", explain(planned))
        folder.write_text(OPTIONS, run_options.to_json(options, path=_import_path()))
        begins = Beginning(record=ProvenanceRecord(made_of=provenance(source)))
        return _through(planned, options, folder, StepHooks(on_step=on_step, until=until), begins)


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
    on_step: Sequence[OnStep] = (),
    until: Until | None = None,
    accept_changes: bool = False,
    **changes: Any,
) -> Result:
    """Go on from a run folder's last checkpoint. changes: options with new values, such as steps=.

    A run that was killed before its first checkpoint starts over, and says so. graph: for a run
    whose functions cannot be imported (a lambda, a notebook's). accept_changes: parameters, data,
    models and source files may differ from the next Step on, which is recorded in changes.json and
    every later checkpoint. Raises CheckpointError for damaged checkpoints, changes that are not
    accepted and missing metrics; RunError if the folder is not a run's.
    """
    path = Path(folder)
    with telling_what_is_safe(path), RunFolder.open_existing(path) as opened:
        text = _recorded(path / OPTIONS)
        options, imports = run_options.from_json(text, changes, str(path / OPTIONS))
        import_from(imports)
        kept = _recorded(path / "graph.json")
        with reading(path / "graph.json"):
            again = graph or read(kept, str(path / "graph.json"))
            checked = check(again)
        planned = _identified(plan(checked, options), again)
        store = CheckpointStore(opened.checkpoints, keep=options.keep)
        made_of = provenance(again)
        begins = beginning(opened, store, made_of, identity(again), accept=accept_changes)
        if graph is not None:
            opened.write_text("graph.json", written(graph))
        opened.write_text(OPTIONS, run_options.to_json(options, path=_import_path()))
        opened.write_text("plan.json", planned.to_json())
        opened.write_text("plan.txt", explain(planned))
        return _through(planned, options, opened, StepHooks(on_step=on_step, until=until), begins)


def peek(
    graph: Graph | Program, node: str, rows: int = 4, options: RunOptions | None = None
) -> pa.Table:
    """The first rows of a node's output, running only what it needs, with every Model at its base.
    Of a Program: `rollout`, or `PHASE/rollout` or `2/rollout` where several phases have the name.
    Raises GraphError.
    """
    if isinstance(graph, Program):
        graph, node = phase_with(graph, node)
    graph.node(node)  # raises with the names that there are
    return first_rows(plan(graph, options), node, rows)


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
