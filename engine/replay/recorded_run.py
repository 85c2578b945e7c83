"""A run folder whose rows were recorded, opened to look at it or to run parts of it again.

Owns: which of the folder's files a rerun reads, and how this installation differs from the run's.
Does not own: choosing what to run (needed_tasks.py), running it (task_replay.py).
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
from engine.keep.layouts_file import read_layouts
from engine.keep.record.stored_assignments import TaskHistory
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
"""What else can: its name in words, its key in versions.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run folder that was read. plan: with the layouts of the run. assignments: what its Workers
    were told to do. installation_changes: what is installed here in another version, in words.
    """

    folder: Path
    options: RunOptions
    plan: Plan
    assignments: TaskHistory
    rows: StoredRows
    installation_changes: tuple[str, ...] = ()

    @property
    def steps(self) -> list[int]:
        """The Steps that were trained while rows were recorded."""
        return self.assignments.steps()

    def node(self, name: str) -> PlannedNode:
        """A node of the plan. Raises RunError with the nearest name."""
        names = [node.name for node in self.plan.nodes]
        if name not in names:
            fix = nearest_or_all(name, names)
            raise RunError(f"rerun of {self.folder}: no node {name!r}. Fix: {fix}.")
        return self.plan.node(name)

    def missing_rows_error(self, what: str, nodes: Sequence[str]) -> RunError:
        """Says that rows of these nodes are needed and were not recorded, and which --record would
        have recorded them.
        """
        nodes_to_record = ",".join(dict.fromkeys([*sorted(self.rows.nodes), *nodes]))
        problem = f"{what} needs recorded rows of {', '.join(nodes)}, found none of them"
        return RunError(f"{self.folder}: {problem}. Fix: a run with --record {nodes_to_record}.")


def open_recorded(
    folder: Path,
    *,
    until: int | None = None,
    graph: Graph | None = None,
    settings: Sequence[str] = (),
) -> RecordedRun:
    """Open a run folder. until: nothing later than this Step is read. graph: in the place of the
    recorded one. settings: parameters with other values than the run had. Raises RunError for a
    folder without records, or of a Program; DataError for damaged ones; GraphError, PlanError.
    """
    recorded = require_recorded(folder)
    options = on_this_host(kept_options(folder)[0])
    if graph is None:
        graph = _read_graph(folder)
    if settings:
        graph = edited(graph, settings)
    # What was chosen is recorded; here nothing is searched anew.
    ruled = make_plan(graph, replace(options, search="off", profile=None))
    plan = _restore_layouts(ruled, _read_planned_nodes(folder))
    assignments = TaskHistory.read(recorded, plan, until)
    return RecordedRun(
        folder=folder,
        options=options,
        plan=plan,
        assignments=assignments,
        rows=StoredRows(recorded, assignments),
        installation_changes=tuple(_find_installation_changes(folder)),
    )


def _read_graph(folder: Path) -> Graph:
    with reading(folder / _GRAPH):
        graph = read(read_document(folder / _GRAPH), str(folder / _GRAPH))
    if isinstance(graph, Program):
        problem = "it is the run of a Program, whose phases count their rows anew"
        raise RunError(f"rerun of {folder}: {problem}. Fix: a run of that phase's graph alone.")
    return graph


def require_recorded(folder: Path) -> Path:
    """Find the folder of what a run recorded. Raises RunError if it recorded nothing."""
    if not is_run(folder):
        raise RunError(f"{folder}: expected a run folder, found none. Fix: runs/NAME.")
    if not (folder / RECORDED).is_dir():
        problem = "expected a run that recorded rows, found one that did not"
        raise RunError(f"{folder}: {problem}. Fix: a run with --record all, or rollout,score.")
    return folder / RECORDED


def list_later_changes(run: RecordedRun, step: int) -> list[str]:
    """List what a resume changed after a Step, so that graph.json is not what that Step was run
    with.
    """
    changes: list[str] = []
    for change in accepted_changes(run.folder / _CHANGES):
        # A changed plan lays nodes out in another way, and changes no parameter.
        if change.step > step and not change.where.startswith("plan of "):
            versions = f"{change.old} until step {change.step - 1}, then {change.new}"
            changes.append(f"{change.where} {change.what}: {versions}")
    return changes


def list_other_layouts(folder: Path, step: int) -> list[str]:
    """Say in words that a Step had another layout than the run's last one, which a rerun has: its
    last bits may differ. Nothing where it had that one.
    """
    layouts = read_layouts(folder)
    later = [each for each in layouts.switches if each.step >= step] if layouts else []
    if layouts is None or not later or later[0].before == layouts.present:
        return []
    return [f"layout: {later[0].before} then, {layouts.present} now"]


def _read_planned_nodes(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """The nodes of the run's own plan.json, by name."""
    path = folder / _PLAN
    with reading(path):
        return {node["name"]: node for node in json.loads(read_document(path))["nodes"]}


def _restore_layouts(plan: Plan, recorded_nodes: Mapping[str, Mapping[str, Any]]) -> Plan:
    """Give the nodes of a new plan the layouts, kernels and Workers of the run: this machine may be
    another.
    """
    nodes: list[PlannedNode] = []
    for node in plan.nodes:
        recorded_node = recorded_nodes.get(node.name)
        if recorded_node is not None:
            node = replace(
                node,
                layout=msgspec.convert(recorded_node["layout"], Layout),
                kernel=recorded_node["kernel"],
                workers=tuple(recorded_node["workers"]),
            )
        nodes.append(node)
    return replace(plan, nodes=tuple(nodes))


def _find_installation_changes(folder: Path) -> list[str]:
    """What is installed here in another version than the run had, as far as it can change bits."""
    path = folder / _VERSIONS
    changes: list[str] = []
    with reading(path):
        recorded = json.loads(read_document(path))
        current = installation()
        versions = [(title, recorded[key], current[key]) for title, key in _OF_HOST]
        for name in _INSTALLED:
            old = recorded["packages"].get(name, "-")
            new = current["packages"].get(name, "-")
            versions.append((name, old, new))
    for name, old, new in versions:
        if old != new:
            changes.append(f"{name} {old} then, {new} now")
    return changes
