"""Seconds a row of nodes that compute with no Model, from a short run of the graph itself.

Owns: the run and the division by rows. Does not own: running (engine/api.py), the metrics.

Only a run has the rows that users' functions expect: their own data, and answers to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from dataflow.graph import Graph
from dataflow.program import Program
from engine.options import RunOptions, on_this_host
from engine.plan.plan import Plan

WARM = 1
"""Steps that do not count: functions load what they need in the first."""
_QUIET: Mapping[str, Any] = {"progress": False, "sinks": (), "record": "", "log_every": 0}


def seconds_a_row(
    graph: Graph | Program, options: RunOptions, plans: Sequence[Plan], steps: int
) -> Iterator[dict[str, float]]:
    """By node; of a Program each phase's graph runs by itself, and the first that has a node
    counts. Raises what a run raises.
    """
    graphs = [phase.graph for phase in graph.phases] if isinstance(graph, Program) else [graph]
    found: dict[str, float] = {}
    for each, plan in zip(graphs, plans, strict=True):
        for name, seconds in _of_graph(each, options, plan, steps).items():
            found.setdefault(name, seconds)
    yield found


def _of_graph(graph: Graph, options: RunOptions, plan: Plan, steps: int) -> dict[str, float]:
    from engine.api import run  # here: it imports what runs kernels
    from engine.observe.measured import seconds_by_step

    with tempfile.TemporaryDirectory(prefix="dataflow-profile-") as folder:
        how = {"steps": steps + WARM, "runs": Path(folder), "name": "profile"}
        result = run(graph, replace(on_this_host(options), **how, **_QUIET))
        rows = seconds_by_step(result.folder)[0]
    found: dict[str, float] = {}
    for node in plan.nodes:
        values = [row[node.name] for row in rows[WARM:] if node.name in row]
        if not node.traits.computes and node.traits.chunked and values:
            found[node.name] = median(values) / _rows(plan, node.name)
    return found


def _rows(plan: Plan, name: str) -> int:
    """Of a node, each Step."""
    node = plan.node(name)
    batch = next((s.batch for s in plan.sources if s.name == node.source), 1)
    return max(1, batch * node.rows)
