"""Seconds a row of nodes that compute with no Model, and of a message, from a short run of the
graph itself.

Owns: the run, and the division by rows and by messages. Does not own: running (engine/api.py), the
metrics.

Only a run has the rows that users' functions expect: their own data, and answers to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from dataflow.graph import Graph
from dataflow.program import Program
from engine.cost.transfers import MESSAGE
from engine.options import RunOptions, on_this_host
from engine.plan.plan import Plan

_ENGINE = "engine"
"""What metrics call the seconds of a Step in which no node worked; those of one Worker have it."""
WARM = 1
"""Steps that do not count: functions load what they need in the first."""
_QUIET: Mapping[str, Any] = {"progress": False, "sinks": (), "record": "", "log_every": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """functions: seconds a row, by node. message: from what a Worker says until what follows; not
    measured where nodes work at the same time.
    """

    functions: Mapping[str, float] = field(default_factory=dict)
    message: float = MESSAGE


def run_times(
    graph: Graph | Program, options: RunOptions, plans: Sequence[Plan], steps: int
) -> Iterator[RunTimes]:
    """Of a Program each phase's graph runs by itself, and the first that has a node counts. Raises
    what a run raises.
    """
    graphs = [phase.graph for phase in graph.phases] if isinstance(graph, Program) else [graph]
    found = [_of_graph(of, options, at, steps) for of, at in zip(graphs, plans, strict=True)]
    functions: dict[str, float] = {}
    for each in found:
        functions = {**each.functions, **functions}
    yield RunTimes(functions=functions, message=found[0].message)


def _of_graph(graph: Graph, options: RunOptions, plan: Plan, steps: int) -> RunTimes:
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
            found[node.name] = fmean(values) / _rows(plan, node.name)
    between = [row[_ENGINE] for row in rows[WARM:] if _ENGINE in row]
    if not between:
        return RunTimes(functions=found)
    # In one Worker nodes follow each other, and new weights follow the last.
    return RunTimes(functions=found, message=fmean(between) / (len(plan.nodes) + 1))


def _rows(plan: Plan, name: str) -> int:
    """Of a node, each Step."""
    node = plan.node(name)
    batch = next((s.batch for s in plan.sources if s.name == node.source), 1)
    return max(1, batch * node.rows)
