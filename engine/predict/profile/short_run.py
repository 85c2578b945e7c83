"""What nodes took in a short run of the graph itself.

Owns: the run, and the division by messages. Does not own: running (engine/session/calls.py), the
metrics and their division by rows (engine/keep/run_measurements.py), what follows for passes of a
Model (run_slowdown.py).

Only a run has the rows that users' functions expect: their own data, and answers to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from dataflow.errors import DataError, PlanError
from dataflow.graph import Graph
from dataflow.program import AnyGraph
from engine.plan.cost.transfers import MESSAGE
from engine.plan.options import RunOptions, on_this_host
from engine.plan.plan import Plan
from engine.predict.row_statistics import SeenRows, seen_rows

_ENGINE = "engine"
"""What metrics call the seconds of a Step in which no node worked; those of one Worker have it."""
WARM = 1
"""Steps that do not count: functions load what they need in the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRun:
    """What one graph took. seconds: a row that a node makes or trains, by node, without those in
    which a function waited for a core. cpu: the share of these in which it computed. message: from
    what a Worker says until what follows; not measured where nodes work at the same time. engine:
    seconds of a core that processes of the run took of a Step beside nodes, where there are several
    Workers. steps: how many counted. rows: how long they were; None where the run has no samples to
    say so.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    cpu: Mapping[str, float] = field(default_factory=dict)
    message: float = MESSAGE
    engine: float = 0.0
    steps: int = 0
    rows: SeenRows | None = None


def measure_short_runs(
    graph: AnyGraph, options: RunOptions, plans: Sequence[Plan], steps: int
) -> Iterator[ShortRun]:
    """Run a graph for some Steps, of a Program each phase's graph by itself. Raises what a run
    raises.
    """
    for phase, plan in zip(graph.phases, plans, strict=True):
        yield _run(phase.graph, options, plan, steps)


def _run(graph: Graph, options: RunOptions, plan: Plan, steps: int) -> ShortRun:
    from engine.session.calls import run  # here: it imports what runs kernels

    with tempfile.TemporaryDirectory(prefix="dataflow-profile-") as folder:
        run_options = replace(
            on_this_host(options),
            steps=steps + WARM,
            runs=Path(folder),
            name="profile",
            # Nobody looks at it, and what is written beside the metrics would take time.
            progress=False,
            sinks=(),
            record="",
            log_every=0,
            # Of each Step: samples say how long its rows were.
            samples_every=1,
        )
        run_result = run(graph, run_options)
        return _read_run(run_result.folder, plan, steps)


def _read_run(folder: Path, plan: Plan, steps: int) -> ShortRun:
    from engine.keep.run_measurements import row_costs, seconds_by_step

    costs = row_costs(folder, after=WARM, rows_a_step={})
    steps_that_count = seconds_by_step(folder)[0][WARM:]
    between = [seconds[_ENGINE] for seconds in steps_that_count if _ENGINE in seconds]
    computed = seconds_by_step(folder, "cpu/")[0][WARM:]
    engine = [seconds[_ENGINE] for seconds in computed if _ENGINE in seconds]
    message = MESSAGE
    if between:
        # In one Worker nodes follow each other, and new weights follow the last.
        message = fmean(between) / (len(plan.nodes) + 1)
    return ShortRun(
        seconds={name: cost.seconds for name, cost in costs.items()},
        cpu={name: cost.cpu for name, cost in costs.items() if cost.cpu is not None},
        message=message,
        engine=fmean(engine) if engine else 0.0,
        steps=steps,
        rows=_read_lengths(folder),
    )


def _read_lengths(folder: Path) -> SeenRows | None:
    """How long the rows in its samples are; None where it has none that say so."""
    try:
        return seen_rows(str(folder))
    except (DataError, PlanError):
        # Nothing is trained, or on rows without tokens.
        return None
