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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from dataflow.storage import writing
from engine.plan.cluster import Host
from engine.plan.cost.devices import CPU
from engine.plan.cost.machine_load import MachineLoad
from engine.plan.plan import Plan
from engine.predict.simulation.critical_path import CriticalPaths, CriticalSum, summed
from engine.predict.simulation.prediction import CoordinatorLoad, Prediction, SimulatedStep
from engine.predict.simulation.utilisation import DeviceUse, NodeUse, TimeShares, Utilisation

FORMAT = 1
HOUR = 3600.0
_NOBODY: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What the hosts of a plan cost. hosts: how many have Workers. unpriced: those of them of which
    nobody said a price; then nothing is known.
    """

    hosts: int
    hour: float
    step: float
    unpriced: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLag:
    """Of a reader's rows, in versions: the mean over the Steps, and the greatest of one Step."""

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
        gpus = [use.shares.busy for use in self.devices if use.kind != CPU]
        each = gpus or [use.shares.busy for use in self.devices]
        return fmean(each) if each else None


def summary_of(found: Prediction) -> PredictionSummary:
    """The figures of a run with a Step or more."""
    ends = [0.0, *(step.end for step in found.steps)]
    seconds = [after - before for before, after in pairwise(ends)]
    after, until = _counted(found.plan, len(seconds))
    counted = found.steps[after:until]
    step = fmean(seconds[after:until])
    tokens = fmean(each.tokens for each in counted)
    when = ends[after], ends[until]
    use = Utilisation(found.plan, found.spans, *when, found.present) if found.spans else None
    return PredictionSummary(
        plan=found.plan,
        seconds=tuple(seconds),
        between=tuple(seconds[after:until]),
        first=counted[0].step,
        last=counted[-1].step,
        step=step,
        rows=fmean(each.rows for each in counted),
        tokens=tokens,
        rate=tokens / step if step else 0.0,
        nodes=tuple(use.nodes()) if use else (),
        devices=tuple(use.devices()) if use else (),
        lag=_lags(counted),
        replicas=_replicas(found.steps),
        path=_path(found, found.steps[until - 1], ends[until - 1]) if use else (),
        coordinator=found.coordinator,
        whole=found.seconds,
        cost=_cost(found.plan, step),
        origins=found.rows,
        load=found.load,
    )


def _counted(plan: Plan, steps: int) -> tuple[int, int]:
    """Of so many Steps, the first that counts and the one after the last."""
    after = 1 if steps > 1 else 0
    until = max(after + 1, steps - 1)
    turn = 1 + max((source.max_lag for source in plan.sources), default=0)
    return (until - (until - after) // turn * turn if until - after > turn else after), until


def _path(found: Prediction, step: SimulatedStep, start: float) -> tuple[CriticalSum, ...]:
    return tuple(summed(CriticalPaths(found.spans).path(step, start)))


def _lags(steps: Sequence[SimulatedStep]) -> dict[str, ReaderLag]:
    readers = dict.fromkeys(reader for step in steps for reader in step.lag)
    lags = {r: [step.lag[r] for step in steps if r in step.lag] for r in readers}
    return {r: ReaderLag(mean=fmean(own), greatest=max(own)) for r, own in lags.items()}


def _replicas(steps: Sequence[SimulatedStep]) -> dict[str, tuple[int, ...]]:
    return {node: tuple(step.replicas[node] for step in steps) for node in steps[0].replicas}


def _cost(plan: Plan, step: float) -> StepCost:
    """Of the hosts that have Workers."""
    hosts = list(_hosts(plan))
    unpriced = tuple(host.name for host in hosts if not host.price) or (
        () if hosts else ("this machine",)
    )
    hour = 0.0 if unpriced else sum(host.price for host in hosts)
    return StepCost(hosts=len(hosts), hour=hour, step=hour * step / HOUR, unpriced=unpriced)


def _hosts(plan: Plan) -> Iterator[Host]:
    """Those with Workers; without hosts in the plan all are on the first."""
    cluster = plan.cluster
    if cluster is None or not cluster.hosts:
        return
    names = dict.fromkeys(plan.hosts.values()) or {cluster.hosts[0].name: None}
    yield from (cluster.host(name) for name in names)


# --- JSON -----------------------------------------------------------------------------------------


def write_json(path: Any, found: Mapping[str, Any]) -> None:
    """Write figures as a file. Raises StorageError."""
    with writing("the figures", path):
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def as_data(found: PredictionSummary, told: Mapping[str, str] = _NOBODY) -> dict[str, Any]:
    """The figures as plain values, keys as docs/cost.md lists them. told: see `rates`."""
    load = found.coordinator
    return {
        "format": FORMAT,
        "graph": found.plan.graph,
        "seed": found.plan.seed,
        "steps": {
            "seconds": list(found.seconds),
            "mean": found.step,
            "from": found.first,
            "until": found.last,
            "rows": found.rows,
            "tokens": found.tokens,
            "tokens_per_second": found.rate,
        },
        "nodes": {u.node: {"workers": u.workers, **_shares(u.shares)} for u in found.nodes},
        "devices": {
            u.device: {"kind": u.kind, "nodes": list(u.nodes), **_shares(u.shares, others=False)}
            for u in found.devices
        },
        "lag": {reader: asdict(lag) for reader, lag in found.lag.items()},
        "replicas": {node: list(counts) for node, counts in found.replicas.items()},
        "critical_path": [asdict(part) for part in found.path],
        "coordinator": {
            "events": load.events,
            "instructions": load.instructions,
            "seconds": load.seconds,
            "seconds_per_event": per_event(load),
            "share": load.seconds / found.whole if found.whole else 0.0,
        },
        "cost": {"known": not found.cost.unpriced, **asdict(found.cost)},
        "rows": dict(found.origins),
        "rates": {name: list(nodes) for name, nodes in rates(found.plan, told).items()},
    }


def _shares(shares: TimeShares, *, others: bool = True) -> dict[str, float]:
    found = asdict(shares)
    return found if others else {k: v for k, v in found.items() if k != "others"}


def per_event(load: CoordinatorLoad) -> float:
    """Seconds of CPU that the coordinator took for an event."""
    return load.seconds / load.events if load.events else 0.0


def rates(plan: Plan, told: Mapping[str, str] = _NOBODY) -> dict[str, list[str]]:
    """Where seconds come from -> the nodes; those that have none are left out. told: `given` or
    `measured` for nodes whose seconds were said beside the plan.
    """
    found: dict[str, list[str]] = {}
    for node in plan.nodes:
        if node.name in told or node.estimate.seconds is not None:
            origin = told.get(node.name, node.estimate.origin)
            found.setdefault(origin, []).append(node.name)
    return found
