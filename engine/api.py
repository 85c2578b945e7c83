"""Check, plan, run as Python calls, for the command line and for notebooks.

Owns: the calls, and what a run folder keeps of one. Does not own: a run's course (attempts.py).

    result = run(grpo("path/to/model", "prompts.parquet", my_reward), RunOptions(steps=100))
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataflow.check import CheckedGraph, check
from dataflow.errors import GraphError, RunError
from dataflow.graph import Graph
from dataflow.importing import import_from
from dataflow.snapshot import fingerprint, from_json, to_json
from engine import options as run_options
from engine.attempts import OnStep, Result, StepHooks, attempts
from engine.checkpoint.provenance import ProvenanceRecord, provenance
from engine.checkpoint.safe import telling_what_is_safe
from engine.checkpoint.store import CheckpointStore
from engine.observe.runfolder import RunFolder
from engine.options import RunOptions
from engine.peek import first_rows
from engine.plan.cluster import read_cluster
from engine.plan.explain import explain
from engine.plan.plan import Plan
from engine.plan.planner import make_plan
from engine.received import reading
from engine.resuming import Beginning, beginning
from engine.run.early_end import Until

__all__ = ["Result", "Until", "peek", "plan", "resume", "run"]

OPTIONS = "options.json"


def plan(graph: Graph | CheckedGraph, options: RunOptions | None = None) -> Plan:
    """Check and plan a graph. Raises GraphError (with options.strict, for warnings), PlanError."""
    options = options or RunOptions()
    checked = graph if isinstance(graph, CheckedGraph) else check(graph)
    placing = run_options.placing(options)
    cluster = None
    if options.cluster is not None:
        from engine.launch.hosts import known  # not needed on one host

        cluster = known(read_cluster(options.cluster), frozenset(placing.hosts.values()))
    seed, threads = options.seed, options.threads
    planned = make_plan(checked, seed=seed, threads=threads, placing=placing, cluster=cluster)
    if options.strict and planned.warnings:
        raise GraphError(planned.warnings)
    return planned


def run(
    graph: Graph | CheckedGraph,
    options: RunOptions | None = None,
    *,
    on_step: Sequence[OnStep] = (),
    until: Until | None = None,
) -> Result:
    """Run a graph from its beginning. on_step: called with each Step's metrics, and again after the
    run went back to its last checkpoint. until: ends the run when it returns True.

    Raises GraphError, PlanError, DataError before anything starts; KernelError or RunError if the
    run fails; StorageError, which says what is safe, if a file cannot be written.
    """
    options = options or RunOptions()
    source = graph.graph if isinstance(graph, CheckedGraph) else graph
    planned = replace(plan(graph, options), digest=fingerprint(source))
    name = options.name or planned.graph
    with (
        telling_what_is_safe(Path(options.runs) / name),
        RunFolder.create(name, options.runs, overwrite=options.overwrite) as folder,
    ):
        folder.write_text("graph.json", to_json(source))
        folder.write_text("plan.json", planned.to_json())
        folder.write_text("plan.txt", explain(planned))
        folder.write_text(OPTIONS, run_options.to_json(options, path=_import_path()))
        begins = Beginning(record=ProvenanceRecord(made_of=provenance(source)))
        return attempts(planned, options, folder, StepHooks(on_step=on_step, until=until), begins)


def resume(
    folder: Path | str,
    *,
    graph: Graph | None = None,
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
            again = graph or from_json(kept, str(path / "graph.json"))
            checked = check(again)
        planned = replace(plan(checked, options), digest=fingerprint(again))
        store = CheckpointStore(opened.checkpoints, keep=options.keep)
        begins = beginning(opened, store, provenance(again), planned.digest, accept=accept_changes)
        if graph is not None:
            opened.write_text("graph.json", to_json(graph))
        opened.write_text(OPTIONS, run_options.to_json(options, path=_import_path()))
        opened.write_text("plan.json", planned.to_json())
        opened.write_text("plan.txt", explain(planned))
        return attempts(planned, options, opened, StepHooks(on_step=on_step, until=until), begins)


def peek(graph: Graph, node: str, rows: int = 4, options: RunOptions | None = None) -> pa.Table:
    """The first rows of a node's output, running only what it needs. Raises GraphError."""
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
