"""A run in words and numbers: its state, its nodes, edges, Models and Workers, as JSON.

Owns: this description, and a run's line in the list of runs. Does not own: the files that it is
made of (engine/keep/reader/plan_records.py, engine/keep/reader/metric_index.py), how a run ends
(engine/keep/end_record.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from dataflow.dialect import with_dialects
from dataflow.draw.node_calls import call_of, shown_value
from dataflow.errors import Origin
from dataflow.graph import Graph
from dataflow.loss import Loss
from dataflow.parameters import parameters_of
from dataflow.program import numbered_phases
from engine.keep.metrics.metric_lines import METRICS
from engine.keep.reader.metric_index import MetricIndex
from engine.keep.reader.open_folder import FileMark, NotServed, OpenFolder, inside
from engine.keep.reader.plan_records import KeptRecords, PlanFile, PlanNode, read_record
from engine.keep.reader.run_state import NO_WORD, UNKNOWN, run_state
from engine.keep.reader.run_summary import BEGINNING, OPTIONS, summarize
from engine.keep.run_folder import ENDED
from engine.plan.drawing import ranks

CHANGES = "changes.json"
_LONGEST = 2000
"""Characters of a parameter's text."""
RECORDED = "recorded"
_GRAPH_NAME = re.compile(r'"(?:graph|program)": "([^"\\]*)"')


def page_state(folder: OpenFolder) -> tuple[str, str]:
    """(state, reason) as the page says it: running, finished, interrupted, failed; ended, where no
    word says how or the word is damaged.
    """
    problems: list[str] = []
    state, reason = run_state(folder, Path(folder.name), problems)
    return _page_words(state, reason, "; ".join(problems))


def _page_words(state: str, reason: str, problem: str) -> tuple[str, str]:
    if state == UNKNOWN:
        return "ended", problem
    if state == NO_WORD:
        return "ended", ""
    return state, reason


def options_of(folder: OpenFolder) -> dict[str, Any]:
    """A run's options as it wrote them; empty where it did not."""
    options = read_record(folder, OPTIONS)
    if isinstance(options, dict):
        return options
    return {}


def describe_in_list(name: str, folder: OpenFolder) -> dict[str, Any]:
    """A run's line in the list; of its metrics only the end is read."""
    run = summarize(folder, Path(name))
    state, reason = _page_words(run.state, run.reason, run.problem)
    began = folder.mark(BEGINNING)
    last = folder.mark(ENDED) or folder.mark(METRICS)
    if state == "running":
        last = None
    return {
        "name": name,
        "graph": _graph_name(folder),
        "state": state,
        "reason": reason,
        "step": run.step,
        "steps": run.steps,
        "began": _unix_time(began),
        "ended": _unix_time(last),
        "reward": run.reward.value if run.reward else None,
    }


def _unix_time(mark: FileMark | None) -> float | None:
    """When a file changed last; None without one."""
    if mark is None:
        return None
    return mark.mtime / 1e9


def _graph_name(folder: OpenFolder) -> str:
    """Find the graph's name in the beginning of plan.json, which may be large."""
    with_head = folder.open("plan.json")
    if with_head is None:
        return ""
    with with_head as file:
        head = file.read(400).decode("utf-8", "replace")
    match = _GRAPH_NAME.search(head)
    if match:
        return match[1]
    return ""


def describe_run(
    name: str, folder: OpenFolder, index: MetricIndex, records: KeptRecords, phase: int
) -> dict[str, Any]:
    """Describe all that does not move in a run. phase: an index; which plan and graph are
    described.
    """
    plan = records.plan_of(phase)
    graph = records.graph_of(phase)
    recorded = _recorded_nodes(folder)
    command = folder.read("command.txt")
    index.refresh(folder)
    return describe_in_list(name, folder) | {
        "command": command.decode("utf-8", "replace").strip() if command else "",
        "phase": phase + 1,
        "phases": list(_phases(records)),
        "sources": msgspec.to_builtins(plan.sources),
        "nodes": [describe_node(node, graph) for node in plan.nodes],
        "edges": list(_edges(plan, recorded)),
        "models": msgspec.to_builtins([*plan.models, *plan.tables]),
        "workers": list(_workers(plan)),
        "changes": _changes(folder),
        "metrics": index.names,
        "recorded": recorded,
        "notes": plan.notes,
        "versions": read_record(folder, "versions.json"),
        "options": options_of(folder),
        "problems": list(records.problems),
    }


def _phases(records: KeptRecords) -> Iterator[dict[str, Any]]:
    if records.graph is None:
        return
    for number, phase in numbered_phases(records.graph):
        # A graph alone has one phase, without a number.
        if number:
            yield {"number": number, "title": phase.graph.name, "steps": phase.steps}


def describe_node(node: PlanNode, graph: Graph | None) -> dict[str, Any]:
    """Describe one node; without a graph, without its call and parameters."""
    call, params, origin = _read_source(node.name, graph)
    total = sum(node.estimate.bytes.values())
    source, file = "", ""
    if origin is not None:
        source = str(origin)
        file = f"{origin.file}:{origin.line}"
    return {
        "name": node.name,
        "operator": node.operator,
        "call": call,
        "work": node.work,
        "kernel": node.kernel,
        "region": node.region,
        "workers": node.workers,
        "source": source,
        "file": file,
        "params": params,
        "layout": layout_words(node),
        "estimate": {
            "bytes": node.estimate.bytes,
            "total": total,
            "seconds": node.estimate.seconds,
        },
    }


def layout_words(node: PlanNode) -> str:
    """`2 replicas of 4 ranks (2 data, 2 tensor), 8 threads`."""
    layout = node.layout
    kinds = {"data": layout.data, "tensor": layout.tensor, "context": layout.context}
    rank_count = ranks(layout)
    replicas = max(1, len(node.workers) // rank_count)
    words = _count(replicas, "replica")
    if rank_count > 1:
        axes = [f"{size} {kind}" for kind, size in kinds.items() if size != 1]
        words += f" of {rank_count} ranks ({', '.join(axes)})"
    parts = [words]
    if layout.shard:
        parts.append("sharded")
    if layout.recompute != "none":
        parts.append(f"recompute {layout.recompute}")
    if layout.offload != "none":
        parts.append(f"offload {layout.offload}")
    if layout.compiled:
        parts.append("compiled layers")
    parts.append(_count(layout.threads, "thread"))
    return ", ".join(parts)


def _count(number: int, thing: str) -> str:
    """`1 thread`, `8 threads`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _read_source(name: str, graph: Graph | None) -> tuple[str, dict[str, str], Origin | None]:
    """A node's call, the text of each parameter, and its place in the source."""
    if graph is None or all(node.name != name for node in graph.nodes):
        return "", {}, None
    whole = with_dialects(graph)
    node = next(node for node in whole.nodes if node.name == name)
    params = {p.name: shown_parameter(p.value) for p in parameters_of(node)}
    for key, parameter in node.params.items():
        # The parameters of a loss are those of its terms.
        if key not in params and not isinstance(parameter, Loss):
            params[key] = shown_parameter(parameter)
    return call_of(node, graph.dialect), params, node.origin


def shown_parameter(parameter: Any) -> str:
    """A parameter's value in full, within reason."""
    if isinstance(parameter, str):
        text = parameter
    else:
        text = shown_value(parameter)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}..."


def _edges(plan: PlanFile, recorded: list[str]) -> Iterator[dict[str, Any]]:
    for edge in plan.edges:
        description = {"id": edge_id(edge.producer, edge.consumer)}
        description |= msgspec.to_builtins(edge)
        yield description | {"recorded": edge.producer in recorded}


def edge_id(producer: str, consumer: str) -> str:
    """How the page names a data edge; a Flow's key."""
    return f"{producer}->{consumer}"


def _workers(plan: PlanFile) -> Iterator[dict[str, Any]]:
    for worker in plan.workers:
        nodes = [node.name for node in plan.nodes if worker in node.workers]
        yield {
            "name": worker,
            "host": plan.hosts.get(worker, ""),
            "devices": plan.devices.get(worker, []),
            "nodes": nodes,
        }


def _changes(folder: OpenFolder) -> list[Any]:
    document = read_record(folder, CHANGES)
    if isinstance(document, dict):
        changes = document.get("changes")
    else:
        changes = None
    if isinstance(changes, list):
        return changes
    return []


def _recorded_nodes(folder: OpenFolder) -> list[str]:
    """The nodes whose rows were recorded."""
    try:
        with inside(folder, RECORDED) as recorded_folder:
            if recorded_folder is None:
                return []
            return [unquote(n) for n in recorded_folder.names() if n[0] not in "._"]
    except NotServed:
        return []


def planned_bytes(plan: PlanFile) -> dict[str, int]:
    """The bytes that the plan expects of each node in each of its Workers."""
    bytes_by_replica: dict[str, int] = {}
    for node in plan.nodes:
        total = sum(node.estimate.bytes.values())
        for worker in node.workers:
            bytes_by_replica[f"{node.name}@{worker}"] = total
    return bytes_by_replica
