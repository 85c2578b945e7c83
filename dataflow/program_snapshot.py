"""Programs as JSON, and back: the graph.json of a run of several phases.

Owns: the document of a Program, and reading either kind. Does not own: a graph's document
(snapshot.py).

    {"format": 1, "name": ..., "origin": ..., "phases": [{"graph": a graph's document, "steps": ...,
     "until": {"metric": ..., "at_least": ..., "at_most": ...}, "optimizers": [names]}, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from dataflow.errors import Fault, GraphError
from dataflow.graph import Graph, Phase, Threshold
from dataflow.json_values import snapshot_error
from dataflow.program import AnyGraph, Program
from dataflow.snapshot import (
    digest_of,
    fingerprint,
    graph_document,
    graph_of,
    modules_of,
    origin_document,
    parse_json,
    read_origin,
    require_keys,
    to_json,
)
from dataflow.standins import make_instance

PROGRAM_FORMAT = 1
_FIX = "give the graph.json of a run folder"


def write_snapshot(target: AnyGraph) -> str:
    """Write a graph or a Program as JSON text. Raises GraphError as `dataflow.snapshot.to_json`."""
    if isinstance(target, Graph):  # a graph alone has a format of its own
        return to_json(target)
    document = {"format": PROGRAM_FORMAT, **_program_document(target, graph_document)}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _program_document(program: Program, of_graph: Callable[[Graph], Any]) -> dict[str, Any]:
    """The document without its format. of_graph: what stands for each phase's graph."""
    phases: list[dict[str, Any]] = []
    for phase in program.phases:
        entry = {
            "graph": of_graph(phase.graph),
            "steps": phase.steps,
            "until": _threshold_document(phase.until),
            "optimizers": list(phase.optimizers),
            "origin": origin_document(phase.origin),
        }
        phases.append(entry)
    return {"name": program.name, "origin": origin_document(program.origin), "phases": phases}


def _threshold_document(threshold: Threshold | None) -> dict[str, Any] | None:
    if threshold is None:
        return None
    return {
        "metric": threshold.metric,
        "at_least": threshold.at_least,
        "at_most": threshold.at_most,
    }


def read(text: str, where: str = "snapshot", *, imports: bool = True) -> AnyGraph:
    """Read what `write_snapshot` wrote, with its origins. where: the text's name in errors;
    imports: as of `dataflow.snapshot.from_json`, which it raises like; all phases' faults at once.
    """
    document = parse_json(text, where)
    if not isinstance(document, dict) or "phases" not in document:
        return graph_of(document, where, imports=imports)
    _require_program(document, where)
    phases: list[Phase] = []
    faults: list[Fault] = []
    for number, entry in enumerate(document["phases"], start=1):
        try:
            phases.append(_read_phase(entry, f"{where}, phase {number}", imports=imports))
        except GraphError as error:
            faults += error.faults
    if faults:
        raise GraphError(faults)
    return Program(*phases, name=document["name"], origin=read_origin(document.get("origin")))


def _require_program(document: dict[str, Any], where: str) -> None:
    """Raise GraphError unless it has a Program's keys and a known format."""
    format_number = document.get("format")
    if not isinstance(format_number, int):
        raise snapshot_error("expected a Program with its format number, found none", _FIX, where)
    if format_number > PROGRAM_FORMAT:
        problem = f"it has format {format_number}, and this version reads up to {PROGRAM_FORMAT}"
        fix = "read it with the dataflow-rl that wrote it, or a newer one"
        raise snapshot_error(problem, fix, where)
    require_keys(document, where, name=str, phases=list)


def _read_phase(entry: Any, where: str, *, imports: bool) -> Phase:
    require_keys(entry, where, graph=dict, optimizers=list)
    fields: dict[str, Any] = {
        "graph": graph_of(entry["graph"], where, imports=imports),
        "steps": entry.get("steps"),
        "optimizers": tuple(entry["optimizers"]),
        "origin": read_origin(entry.get("origin")),
    }
    if entry.get("until") is not None:
        threshold = require_keys(entry["until"], where, metric=str)
        fields["until"] = make_instance(Threshold, threshold, where)
    return make_instance(Phase, fields, where)


def identity(target: AnyGraph) -> str:
    """A digest that another process computes, too; of a graph its `fingerprint`."""
    if isinstance(target, Graph):  # checkpoints have it as it was before there were Programs
        return fingerprint(target)
    return digest_of(_program_document(target, fingerprint))


def named_modules(text: str) -> tuple[str, ...]:
    """The modules, sorted, that `read` imports besides this project's own."""
    document = parse_json(text, "snapshot")
    if not isinstance(document, dict) or "phases" not in document:
        return modules_of(document)
    _require_program(document, "snapshot")
    graphs = [require_keys(entry, "phase", graph=dict)["graph"] for entry in document["phases"]]
    names: set[str] = set()
    for graph in graphs:
        names.update(modules_of(graph))
    return tuple(sorted(names))
