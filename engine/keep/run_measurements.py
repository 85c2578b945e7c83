"""What a run measured, from its folder, for the tables beside its plan and for predictions.

Owns: means over Steps, and the greatest of peaks, by phase; seconds of a row. Does not own: the
files (engine/keep/metrics/sinks.py, engine/keep/flow/segments.py), the tables
(engine/plan/explain/measurements.py).

With a lag the batches of several Steps may be made in one of them, and nothing in the next, whose
metrics then do not name the node. So seconds are added up over Steps and divided once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.errors import DataError
from dataflow.program import numbered_name
from engine.keep.flow.records import Flow
from engine.keep.flow.segments import read_steps
from engine.keep.metrics.metric_lines import METRICS, recorded_rows
from engine.plan.explain.measurements import MeasuredRun, MeasuredWeights

EVENTS = "events"
KEPT = "/kept"
"""How the metric of a selection ends (operators/kernels/host.py)."""


def read_measured(folder: Path) -> dict[int, MeasuredRun]:
    """Read what a run measured, by phase of a Program; 0 is a graph alone. Raises DataError for a
    folder without metrics.
    """
    rows = seconds_by_step(folder)
    flows: dict[int, list[Flow]] = defaultdict(list)
    for record in read_steps(folder / EVENTS):
        if isinstance(record, Flow):
            flows[record.phase].append(record)
    return {phase: _measure_run(rows[phase], flows[phase]) for phase in rows}


def node_seconds(folder: Path) -> dict[str, float]:
    """Node -> mean seconds a Step, from a run folder's metrics; of a Program with the phase's
    number before it, as `2/rollout`. Raises DataError without any.
    """
    means: dict[str, float] = {}
    for phase, steps in seconds_by_step(folder).items():
        for name, seconds in _means(steps).items():
            means[numbered_name(phase, name)] = seconds
    return means


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """Of one row of a node, with as many cores as it can use. cpu: the share of its seconds in
    which it computed, and did not wait for something outside; None where the run did not measure
    it.
    """

    seconds: float
    cpu: float | None = None


def row_costs(folder: Path, *, after: int, rows_a_step: Mapping[str, float]) -> dict[str, RowCost]:
    """Find the cost of a row by node, from the rows that a run of a graph made, or trained, in the
    Steps after the first `after`. rows_a_step: by node, for a run that kept no `events/` to say
    so; nodes that neither names are left out. Raises DataError for a folder without metrics.
    """
    steps = seconds_by_step(folder).get(0, [])[after:]
    cpu = _means(seconds_by_step(folder, "cpu/").get(0, [])[after:])
    queued = _means(seconds_by_step(folder, "queue/").get(0, [])[after:])
    rows = _rows_of_a_step(folder, after) or rows_a_step
    costs: dict[str, RowCost] = {}
    for name, taken in _means(steps).items():
        computed = min(cpu.get(name, 0.0), taken)
        seconds = max(computed, taken - queued.get(name, 0.0))
        if rows.get(name):
            if name in cpu and seconds:
                share = computed / seconds
            else:
                share = None
            costs[name] = RowCost(seconds=seconds / rows[name], cpu=share)
    return costs


def _rows_of_a_step(folder: Path, after: int) -> dict[str, float]:
    """By node, the mean over the Steps after the first ones; empty without records of them."""
    steps = [rows for step, rows in node_rows_by_step(folder).items() if step > after]
    sums: Counter[str] = Counter()
    for rows in steps:
        sums.update(rows)
    return {name: total / len(steps) for name, total in sums.items()}


def seconds_by_step(folder: Path, kind: str = "time/") -> dict[int, list[dict[str, float]]]:
    """Phase (0: a graph alone) -> of each Step, node -> seconds. kind: of seconds, as metrics call
    it. Raises DataError without any.
    """
    rows_by_phase: dict[int, list[dict[str, float]]] = defaultdict(list)
    for phase, row in _rows(folder, kind):
        rows_by_phase[phase].append(row)
    return dict(rows_by_phase)


def kept_by_step(folder: Path) -> list[dict[str, float]]:
    """Of each Step of a graph alone, selection -> the share of its rows that it kept. Raises
    DataError without metrics.
    """
    return [_select_metrics(row, after=KEPT) for phase, row in _metrics(folder) if phase == 0]


def node_rows_by_step(folder: Path) -> dict[int, Counter[str]]:
    """Step -> node -> the rows that it made or trained in that Step, evaluations included; of a
    graph alone. Empty for a run without records of its Steps.
    """
    rows_by_step: dict[int, Counter[str]] = {}
    for record in read_steps(folder / EVENTS):
        if isinstance(record, Flow):
            rows: Counter[str] = Counter()
            for replica, flow in record.nodes.items():
                rows[replica.partition("@")[0]] += flow.rows
            rows_by_step[record.step] = rows  # of a Step that was done again, the last time counts
    return rows_by_step


def _rows(folder: Path, kind: str) -> Iterator[tuple[int, dict[str, float]]]:
    """The phase and the seconds by node of each line of metrics."""
    for phase, row in _metrics(folder):
        seconds = _select_metrics(row, before=kind)
        # What follows a node's name is a part of its seconds: rollout/environments.
        yield phase, {node: number for node, number in seconds.items() if "/" not in node}


def _select_metrics(
    row: Mapping[str, float], before: str = "", after: str = ""
) -> dict[str, float]:
    """The metrics whose names begin and end so, by what is between."""
    return {
        name.removeprefix(before).removesuffix(after): number
        for name, number in row.items()
        if name.startswith(before) and name.endswith(after)
    }


def _metrics(folder: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The phase and the numbers of each row of metrics."""
    path = folder / METRICS
    if not path.is_file():
        problem = f"expected a run folder with {METRICS}"
        raise DataError(f"{folder}: {problem}. Fix: --measured runs/NAME.")
    try:
        rows = list(recorded_rows(path))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise DataError(f"{path}: {problem}. Fix: --measured runs/NAME.") from error
    for row in rows:
        yield _numbers(row, f"{path}, step {row['step']}")


def _numbers(row: Mapping[str, Any], where: str) -> tuple[int, dict[str, float]]:
    try:
        numbers = {name: float(number) for name, number in row.items() if number is not None}
        return int(row.get("phase", 0)), numbers
    except (ValueError, TypeError, OverflowError) as error:
        problem = f"expected numbers, found {error}"
        raise DataError(f"{where}: {problem}. Fix: delete the line, if it is the last.") from error


def _means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Name -> mean over all Steps; one that does not name it had none of it."""
    sums: dict[str, float] = defaultdict(float)
    for step in steps:
        for name, number in step.items():
            sums[name] += number
    return {name: total / len(steps) for name, total in sums.items()}


def _measure_run(rows: list[dict[str, float]], flows: list[Flow]) -> MeasuredRun:
    peaks: Counter[str] = Counter()
    grown: Counter[str] = Counter()
    devices: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for flow in flows:
        peaks |= Counter({name: worker.peak for name, worker in flow.workers.items()})
        opened = {name: worker for name, worker in flow.workers.items() if worker.before}
        grown |= Counter({name: each.peak - each.before for name, each in opened.items()})
        devices |= Counter({name: node.device_peak for name, node in flow.nodes.items()})
        moved.update({name: edge.bytes for name, edge in flow.edges.items()})
    return MeasuredRun(
        steps=len(rows),
        seconds=_means(rows),
        flows=bool(flows),
        peaks=dict(peaks),
        grown=dict(grown),
        device_peaks=dict(devices),
        edges={name: size / len(flows) for name, size in moved.items()},
        weights=_weights(flows),
    )


def _weights(flows: list[Flow]) -> Mapping[str, MeasuredWeights]:
    """Take the mean over all loads of a weight edge."""
    loads: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    for flow in flows:
        for name, edge in flow.weights.items():
            loads[name] += edge.loads
            sizes[name] += edge.bytes
            seconds[name] += edge.seconds
    return {
        name: MeasuredWeights(bytes=sizes[name] / number, seconds=seconds[name] / number)
        for name, number in loads.items()
        if number
    }
