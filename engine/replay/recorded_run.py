"""A run folder whose rows were recorded, opened to look at it or to run parts of it again.

Owns: what of the folder a rerun is made of, and in what this process differs from the run's. Does
not own: choosing what to run (needed_tasks.py), running it (task_replay.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from dataflow.errors import RunError, nearest_or_all
from dataflow.graph import Graph
from dataflow.kernel import Layout
from dataflow.program import Program
from dataflow.program_snapshot import read
from dataflow.set_expressions import edited
from engine.keep.record.stored_assignments import Told
from engine.keep.record.stored_rows import StoredRows
from engine.keep.run_folder import RECORDED, installation, is_run
from engine.keep.untrusted_files import kept_options, read_document, reading
from engine.plan.options import RunOptions, on_this_host
from engine.plan.plan import Plan, PlannedNode
from engine.replay.run_diff import accepted_changes
from engine.session.planning import plan as make_plan

_GRAPH, _PLAN, _VERSIONS, _CHANGES = "graph.json", "plan.json", "versions.json", "changes.json"
_INSTALLED = ("torch", "transformers", "numpy", "pyarrow", "tokenizers", "safetensors", "vllm")
"""Packages whose versions can change the bits of a number."""
_OF_HOST = (("Python", "python"), ("host", "platform"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """plan: the run's own, with its layouts. others: in what this installation is another."""

    folder: Path
    options: RunOptions
    plan: Plan
    told: Told
    rows: StoredRows
    others: tuple[str, ...] = ()

    @property
    def steps(self) -> list[int]:
        """The Steps that were trained while rows were recorded."""
        return self.told.steps()

    def node(self, name: str) -> PlannedNode:
        """A node of the plan. Raises RunError with the nearest name."""
        names = [n.name for n in self.plan.nodes]
        if name not in names:
            fix = nearest_or_all(name, names)
            raise RunError(f"rerun of {self.folder}: no node {name!r}. Fix: {fix}.")
        return self.plan.node(name)

    def missing(self, what: str, nodes: Sequence[str]) -> RunError:
        """Rows of these nodes are needed, and were not recorded."""
        wanted = ",".join(dict.fromkeys([*sorted(self.rows.nodes), *nodes]))
        problem = f"{what} needs recorded rows of {', '.join(nodes)}, found none of them"
        return RunError(f"{self.folder}: {problem}. Fix: a run with --record {wanted}.")


def open_recorded(
    folder: Path,
    *,
    until: int | None = None,
    graph: Graph | None = None,
    settings: Sequence[str] = (),
) -> RecordedRun:
    """Open it. until: nothing later than this Step is looked at. graph: in
    the place of the recorded one. settings: parameters with other values than the run had. Raises
    RunError for a folder without records, or of a Program; DataError for damaged ones; GraphError,
    PlanError.
    """
    recorded = require_recorded(folder)
    options = on_this_host(kept_options(folder)[0])
    graph = _recorded_graph(folder) if graph is None else graph
    graph = edited(graph, settings) if settings else graph
    plan = _as_it_was(make_plan(graph, options), _recorded_plan(folder))
    told = Told.read(recorded, plan, until)
    return RecordedRun(
        folder=folder,
        options=options,
        plan=plan,
        told=told,
        rows=StoredRows(recorded, told),
        others=tuple(_others(folder)),
    )


def _recorded_graph(folder: Path) -> Graph:
    with reading(folder / _GRAPH):
        graph = read(read_document(folder / _GRAPH), str(folder / _GRAPH))
    if isinstance(graph, Program):
        problem = "it is the run of a Program, whose phases count their rows anew"
        raise RunError(f"rerun of {folder}: {problem}. Fix: a run of that phase's graph alone.")
    return graph


def require_recorded(folder: Path) -> Path:
    """The folder of what a run recorded. Raises RunError if it recorded nothing."""
    if not is_run(folder):
        raise RunError(f"{folder}: expected a run folder, found none. Fix: runs/NAME.")
    if not (folder / RECORDED).is_dir():
        problem = "expected a run that recorded rows, found one that did not"
        raise RunError(f"{folder}: {problem}. Fix: a run with --record all, or rollout,score.")
    return folder / RECORDED


def changed_later(run: RecordedRun, step: int) -> list[str]:
    """What a resume changed after a Step, so that graph.json is not what that Step was run with."""
    found = accepted_changes(run.folder / _CHANGES)
    return [
        f"{each.where} {each.what}: {each.old} until step {each.step - 1}, then {each.new}"
        for each in found
        if each.step > step and not each.where.startswith("plan of ")
    ]


def _recorded_plan(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """The nodes of the run's own plan.json, by name."""
    path = folder / _PLAN
    with reading(path):
        return {node["name"]: node for node in json.loads(read_document(path))["nodes"]}


def _as_it_was(plan: Plan, recorded: Mapping[str, Mapping[str, Any]]) -> Plan:
    """The plan with the layouts and kernels of the run: this machine may be another."""
    nodes = []
    for node in plan.nodes:
        was = recorded.get(node.name)
        if was is not None:
            layout = msgspec.convert(was["layout"], Layout)
            workers = tuple(was["workers"])
            node = replace(node, layout=layout, kernel=was["kernel"], workers=workers)
        nodes.append(node)
    return replace(plan, nodes=tuple(nodes))


def _others(folder: Path) -> list[str]:
    """In what this installation is another than the run's, as far as it can change bits."""
    path = folder / _VERSIONS
    with reading(path):
        was = json.loads(read_document(path))
        now = installation()
        pairs = [
            ("Python", was["python"], now["python"]),
            ("host", was["platform"], now["platform"]),
        ]
        pairs += [
            (name, was["packages"].get(name, "-"), now["packages"].get(name, "-"))
            for name in _INSTALLED
        ]
    return [f"{name} {old} then, {new} now" for name, old, new in pairs if old != new]
