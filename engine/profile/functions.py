"""Seconds a row of nodes that compute with no Model, from a short run of the graph itself.

Owns: the run and the division by rows. Does not own: running (engine/api.py), the metrics.

Only a run has the rows that users' functions expect: their own data, and answers to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from dataflow.graph import Graph
from dataflow.program import Program
from engine.options import RunOptions
from engine.plan.plan import Plan

WARM = 1
"""Steps that do not count: functions load what they need in the first."""


def seconds_a_row(
    graph: Graph | Program, options: RunOptions, plans: Sequence[Plan], steps: int
) -> Iterator[dict[str, float]]:
    """By node; of a Program the first phase that has it. Raises what a run raises."""
    from engine.api import run  # here: it imports what runs kernels
    from engine.observe.measured import seconds_by_step

    with tempfile.TemporaryDirectory(prefix="dataflow-profile-") as folder:
        wanted = None if isinstance(graph, Program) else steps + WARM
        quiet = {"progress": False, "sinks": (), "record": "", "name": "profile"}
        result = run(graph, replace(options, steps=wanted, runs=Path(folder), **quiet))
        by_step = seconds_by_step(result.folder)
    found: dict[str, float] = {}
    for number, plan in enumerate(plans, 1):
        rows = by_step.get(number if isinstance(graph, Program) else 0, [])
        for node in plan.nodes:
            values = [row[node.name] for row in rows[WARM:] if node.name in row]
            if not node.traits.computes and node.traits.chunked and values:
                found.setdefault(node.name, median(values) / _rows(plan, node.name))
    yield found


def _rows(plan: Plan, name: str) -> int:
    """Of a node, each Step."""
    node = plan.node(name)
    batch = next((s.batch for s in plan.sources if s.name == node.source), 1)
    return max(1, batch * node.rows)
