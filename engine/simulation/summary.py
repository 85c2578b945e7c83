"""What a simulated run comes to: figures of Steps, nodes, devices, lag and the coordinator.

Owns: the figures, and their form in JSON. Does not own: how they are said (report.py), how plans
are compared by them (plan_comparison.py).

The first Step has nothing to overlap with; in the last one nothing is made for a next one, and what
comes at a run's end is done. So neither counts where there are others: means and shares are those
of the Steps between, of two Steps those of the second. With a lag, batches of 1 + lag Steps may be
made together, so that long and short Steps alternate: then as many count as are whole turns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from dataflow.storage import writing
from engine.plan.cost.devices import CPU
from engine.plan.cost.machine_load import MachineLoad
from engine.plan.plan import Plan
from engine.plan.step_cost import StepCost, step_cost
from engine.simulation.critical_path import CriticalPaths, CriticalSum, sum_parts
from engine.simulation.prediction import CoordinatorLoad, Prediction, SimulatedStep
from engine.simulation.utilisation import DeviceUse, NodeUse, Utilisation

FORMAT = 1
_NO_ORIGINS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLag:
    """How old a reader's rows are, in versions: the mean over Steps, and the most of one Step."""

    mean: float
    greatest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionSummary:
    """All that is said of a Prediction. seconds: of each Step, from the end of the one before;
    between: of those that count, from `first` to `last`, which the path is of. replicas: of each
    elastic node, how many were there at the end of each Step. nodes, devices, path: empty where its
    spans were not kept. whole: the run's seconds. origins: by node, where the number and the
    lengths of its rows come from. load: how busy the machine of the profile was.
    """

    plan: Plan
    seconds: tuple[float, ...]
    between: tuple[float, ...]
    first: int
    last: int
    step: float
    rows: float
    tokens: float
    rate: float
    nodes: tuple[NodeUse, ...]
    devices: tuple[DeviceUse, ...]
    lag: Mapping[str, ReaderLag]
    replicas: Mapping[str, tuple[int, ...]]
    path: tuple[CriticalSum, ...]
    coordinator: CoordinatorLoad
    whole: float
    cost: StepCost
    origins: Mapping[str, str]
    load: MachineLoad = field(default_factory=MachineLoad)

    @property
    def busy(self) -> float | None:
        """The share of the GPUs' time (without any, the Workers') in which they compute; None where
        it is not known.
        """
        gpu_shares = [use.shares.busy for use in self.devices if use.kind != CPU]
        shares = gpu_shares or [use.shares.busy for use in self.devices]
        if not shares:
            return None
        return fmean(shares)


def summary_of(prediction: Prediction) -> PredictionSummary:
    """Work out the figures of a run with a Step or more."""
    plan = prediction.plan
    ends = [0.0, *(step.end for step in prediction.steps)]
    seconds = [after - before for before, after in pairwise(ends)]
    first, stop = _counted_steps(plan, len(seconds))
    counted_steps = prediction.steps[first:stop]
    mean = fmean(seconds[first:stop])
    tokens = fmean(step.tokens for step in counted_steps)
    nodes: tuple[NodeUse, ...] = ()
    devices: tuple[DeviceUse, ...] = ()
    path: tuple[CriticalSum, ...] = ()
    spans = prediction.spans
    if spans:
        use = Utilisation(plan, spans, ends[first], ends[stop], prediction.present)
        nodes, devices = tuple(use.nodes()), tuple(use.devices())
        # Of the last Step that counts: what it waited for stands for the others.
        path = _sum_path(prediction, prediction.steps[stop - 1], ends[stop - 1])
    return PredictionSummary(
        plan=plan,
        seconds=tuple(seconds),
        between=tuple(seconds[first:stop]),
        first=counted_steps[0].step,
        last=counted_steps[-1].step,
        step=mean,
        rows=fmean(step.rows for step in counted_steps),
        tokens=tokens,
        rate=tokens / mean if mean else 0.0,
        nodes=nodes,
        devices=devices,
        lag=_mean_lags(counted_steps),
        replicas=_replica_counts(prediction.steps),
        path=path,
        coordinator=prediction.coordinator,
        whole=prediction.seconds,
        cost=step_cost(plan, plan.cluster, mean),
        origins=prediction.rows,
        load=prediction.load,
    )


def _counted_steps(plan: Plan, steps: int) -> tuple[int, int]:
    """The index of the first Step that counts, of so many, and of the one after the last."""
    first = 1 if steps > 1 else 0
    stop = max(first + 1, steps - 1)
    turn = 1 + max((source.max_lag for source in plan.sources), default=0)
    if stop - first > turn:
        # Long and short Steps alternate with the lag: a part of a turn would shift the mean.
        first = stop - (stop - first) // turn * turn
    return first, stop


def _sum_path(prediction: Prediction, step: SimulatedStep, start: float) -> tuple[CriticalSum, ...]:
    path = CriticalPaths(prediction.spans).path(step, start)
    return tuple(sum_parts(path))


def _mean_lags(steps: Sequence[SimulatedStep]) -> dict[str, ReaderLag]:
    """By reader, in the order in which Steps name them; a Step may have no rows of one."""
    lags_by_reader: dict[str, list[float]] = {}
    for step in steps:
        for reader, lag in step.lag.items():
            lags_by_reader.setdefault(reader, []).append(lag)
    return {
        reader: ReaderLag(mean=fmean(lags), greatest=max(lags))
        for reader, lags in lags_by_reader.items()
    }


def _replica_counts(steps: Sequence[SimulatedStep]) -> dict[str, tuple[int, ...]]:
    """By elastic node, how many there were at the end of each Step."""
    counts: dict[str, tuple[int, ...]] = {}
    for node in steps[0].replicas:
        counts[node] = tuple(step.replicas[node] for step in steps)
    return counts


# --- JSON -----------------------------------------------------------------------------------------


def write_json(path: Any, figures: Mapping[str, Any]) -> None:
    """Write figures as a file. Raises StorageError."""
    with writing("the figures", path):
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def as_data(
    summary: PredictionSummary, seconds_origins: Mapping[str, str] = _NO_ORIGINS
) -> dict[str, Any]:
    """Give the figures as plain values, with keys as docs/cost.md lists them. seconds_origins: see
    `group_by_origin`.
    """
    load = summary.coordinator
    nodes_by_origin = group_by_origin(summary.plan, seconds_origins)
    return {
        "format": FORMAT,
        "graph": summary.plan.graph,
        "seed": summary.plan.seed,
        "steps": {
            "seconds": list(summary.seconds),
            "mean": summary.step,
            "from": summary.first,
            "until": summary.last,
            "rows": summary.rows,
            "tokens": summary.tokens,
            "tokens_per_second": summary.rate,
        },
        "nodes": {use.node: _node_figures(use) for use in summary.nodes},
        "devices": {use.device: _device_figures(use) for use in summary.devices},
        "lag": {reader: asdict(lag) for reader, lag in summary.lag.items()},
        "replicas": {node: list(counts) for node, counts in summary.replicas.items()},
        "critical_path": [asdict(part) for part in summary.path],
        "coordinator": {
            "events": load.events,
            "instructions": load.instructions,
            "seconds": load.seconds,
            "seconds_per_event": seconds_per_event(load),
            "share": load.seconds / summary.whole if summary.whole else 0.0,
        },
        "cost": {"known": not summary.cost.unpriced, **asdict(summary.cost)},
        "rows": dict(summary.origins),
        "rates": nodes_by_origin,
    }


def _node_figures(use: NodeUse) -> dict[str, Any]:
    return {"workers": use.workers, **asdict(use.shares)}


def _device_figures(use: DeviceUse) -> dict[str, Any]:
    shares = asdict(use.shares)
    # Always 0: a device's time is not divided by node.
    del shares["others"]
    return {"kind": use.kind, "nodes": list(use.nodes), **shares}


def seconds_per_event(load: CoordinatorLoad) -> float:
    """Seconds of CPU that the coordinator took for an event."""
    if not load.events:
        return 0.0
    return load.seconds / load.events


def group_by_origin(
    plan: Plan, seconds_origins: Mapping[str, str] = _NO_ORIGINS
) -> dict[str, list[str]]:
    """Group nodes by where their seconds come from; those that have none are left out.
    seconds_origins: `given` or `measured` for nodes whose seconds were said beside the plan.
    """
    nodes_by_origin: dict[str, list[str]] = {}
    for node in plan.nodes:
        if node.name in seconds_origins or node.estimate.seconds is not None:
            origin = seconds_origins.get(node.name, node.estimate.origin)
            nodes_by_origin.setdefault(origin, []).append(node.name)
    return nodes_by_origin
