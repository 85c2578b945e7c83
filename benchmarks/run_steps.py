"""The Steps of a run of ours, for our side of a comparison.

Owns: the options of such a run. Does not own: its graph, what is measured of its Steps.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Protocol

from dataflow.graph import Graph
from engine.api import run
from engine.plan.options import RunOptions

StepRow = dict[str, float]


class RunSize(Protocol):
    """How long a run is, and on how many threads; steps do not count the warm-up."""

    @property
    def steps(self) -> int: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def threads(self) -> int: ...


def run_steps(graph: Graph, size: RunSize, **layout: Any) -> list[StepRow]:
    """Run a graph; the metrics of the Steps behind the warm-up. layout: further options."""
    rows: list[StepRow] = []
    with tempfile.TemporaryDirectory() as folder:
        usual: dict[str, Any] = {"threads": size.threads, "samples_every": 10**9}
        options = RunOptions(
            steps=size.warmup_steps + size.steps,
            seed=size.seed,
            name="side",
            runs=Path(folder),
            progress=False,
            **usual | layout,
        )
        run(graph, options, on_step=[lambda row: rows.append(dict(row))])
    return rows[size.warmup_steps :]
