"""Where the time of Workers went in a simulated run: computing, or waiting, and for what.

Owns: the shares of a Worker's time by node, and those of devices. Does not own: which stretch of
time counts (summary.py), how it is said (report.py).

    busy      the device computes, or a function runs
    rows      nothing was there to work on until the next chunk's rows were, and their way here
    weights   nothing was there to work on until the next version was, its way here, and offering it
    idle      all else: other ranks are waited for, the devices' turn is another Worker's, the end

A Worker does one thing after another, so what it did between two spans is said by the next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.plan.cost.devices import CPU
from engine.plan.plan import Plan
from engine.run.simulated_workers.spans import SimulatedSpan

_ALWAYS_PRESENT: Mapping[str, Sequence[tuple[float, float]]] = {}
_WEIGHTS = ("load", "offer")
_ASIDE = ("start", "wake", "sleep", "record")
"""Work for which no rows and no weights are waited for."""


@dataclass(slots=True)
class TimeShares:
    """Seconds, or shares of a whole, of what there was to do. others: of other nodes."""

    busy: float = 0.0
    rows: float = 0.0
    weights: float = 0.0
    others: float = 0.0
    idle: float = 0.0

    @property
    def node_time(self) -> float:
        """What is known to be a node's: the rest is others', or idle."""
        return self.busy + self.rows + self.weights

    def add(self, other: TimeShares) -> None:
        """Add another's to these."""
        self.busy += other.busy
        self.rows += other.rows
        self.weights += other.weights
        self.others += other.others
        self.idle += other.idle

    def divide(self, whole: float) -> TimeShares:
        """Give them as shares of a whole; all 0 of a whole of nothing."""
        part = 1.0 / whole if whole > 0 else 0.0
        return TimeShares(
            busy=self.busy * part,
            rows=self.rows * part,
            weights=self.weights * part,
            others=self.others * part,
            idle=self.idle * part,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """How all Workers of a node spend the time while they are there; the shares add up to 1.
    workers: how many there are in the mean.
    """

    node: str
    workers: float
    shares: TimeShares


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """How one GPU, or a Worker on cores, spent its time; the shares add up to 1."""

    device: str
    kind: str
    nodes: tuple[str, ...]
    shares: TimeShares


class Utilisation:
    """Of the spans of a plan's Workers between two times. present: when those were there that were
    not there all the time.
    """

    def __init__(
        self,
        plan: Plan,
        spans: Iterable[SimulatedSpan],
        start: float,
        end: float,
        present: Mapping[str, Sequence[tuple[float, float]]] = _ALWAYS_PRESENT,
    ) -> None:
        self._plan, self._whole = plan, end - start
        self._present: dict[str, float] = {}
        """Worker -> seconds in which it was there; only Workers that come or go."""
        for worker, times in present.items():
            overlaps = (min(last, end) - max(first, start) for first, last in times)
            self._present[worker] = sum(max(0.0, overlap) for overlap in overlaps)
        by_worker: dict[str, list[SimulatedSpan]] = defaultdict(list)
        for span in spans:
            by_worker[span.worker].append(span)
        self._seconds: dict[str, Mapping[str, TimeShares]] = {}
        """Worker -> node -> seconds; under the empty name those of nodes that are none."""
        for worker, worker_spans in by_worker.items():
            worker_spans.sort(key=lambda span: span.start)
            self._seconds[worker] = _divide_by_node(worker_spans, start, end)

    def nodes(self) -> Iterator[NodeUse]:
        """The time of each node of the plan, in its order."""
        totals = {worker: self._total(worker) for worker in self._plan.workers}
        for node in self._plan.nodes:
            seconds = TimeShares()
            for worker in node.workers:
                mine = self._seconds.get(worker, {}).get(node.name, TimeShares())
                total = totals[worker].node_time
                others = total - mine.node_time
                seconds.add(TimeShares(mine.busy, mine.rows, mine.weights, others))
            present = sum(self._present.get(worker, self._whole) for worker in node.workers)
            seconds.idle = max(0.0, present - seconds.node_time - seconds.others)
            if self._whole and not self._present.keys().isdisjoint(node.workers):
                workers = present / self._whole
            else:
                workers = len(node.workers)
            yield NodeUse(node=node.name, workers=workers, shares=seconds.divide(present))

    def devices(self) -> Iterator[DeviceUse]:
        """Each device that some Worker has; those of several Workers have their shares together."""
        nodes_of: dict[str, list[str]] = defaultdict(list)
        for node in self._plan.nodes:
            for worker in node.workers:
                nodes_of[worker].append(node.name)
        workers_on: dict[tuple[str, str], list[str]] = defaultdict(list)
        for worker in nodes_of:
            for device in _devices_of(self._plan, worker):
                workers_on[device].append(worker)
        for (device, kind), workers in workers_on.items():
            nodes: dict[str, None] = {}
            for worker in workers:
                nodes |= dict.fromkeys(nodes_of[worker])
            shares = self._share_device(workers)
            yield DeviceUse(device=device, kind=kind, nodes=tuple(nodes), shares=shares)

    def _share_device(self, workers: Sequence[str]) -> TimeShares:
        """Share the time of Workers on one device: while one computes, no other's wait counts."""
        totals = [self._total(worker) for worker in workers]
        whole = self._whole
        busy = min(whole, sum(total.busy for total in totals))
        rows = sum(total.rows for total in totals)
        weights = sum(total.weights for total in totals)
        idle = sum(max(0.0, whole - total.node_time) for total in totals)
        # What is left beside the busy time is divided as the Workers' waiting was.
        waited = rows + weights + idle
        part = (whole - busy) / waited if waited > 0 else 0.0
        return TimeShares(busy, rows * part, weights * part, 0.0, idle * part).divide(whole)

    def _total(self, worker: str) -> TimeShares:
        """Seconds of all nodes of a Worker; all 0 for one that did nothing."""
        seconds_by_node = self._seconds.get(worker, {})
        return _sum(seconds_by_node.values())


def _sum(parts: Iterable[TimeShares]) -> TimeShares:
    total = TimeShares()
    for seconds in parts:
        total.add(seconds)
    return total


def _divide_by_node(
    spans: Sequence[SimulatedSpan], start: float, end: float
) -> dict[str, TimeShares]:
    """Divide one Worker's time by node; idle is what is left. spans: in order of their starts."""
    seconds_by_node: dict[str, TimeShares] = defaultdict(TimeShares)
    until = start
    for span in spans:
        seconds = seconds_by_node[span.node]
        begun, ended = max(span.start, until), min(span.end, end)
        # The gap before a span is what this span waited for.
        gap = max(0.0, min(begun, end) - until)
        if span.what in _WEIGHTS:
            seconds.weights += gap
        elif span.what not in _ASIDE:
            seconds.rows += gap
        until = max(until, min(begun, end))
        if ended > until:
            _add_span(span, ended - until, seconds)
            until = ended
    return seconds_by_node


def _add_span(span: SimulatedSpan, counted: float, total: TimeShares) -> None:
    """Add so many seconds of a span: all of it, but for what lies outside the time that counts."""
    part = counted / (span.end - span.start)
    if span.what in _WEIGHTS:
        total.weights += counted
        return
    fetched = min(counted, span.fetch * part)
    total.rows += fetched
    total.busy += min(counted - fetched, span.busy * part)


def _devices_of(plan: Plan, worker: str) -> Iterator[tuple[str, str]]:
    """(name, kind) of each."""
    if worker not in plan.devices:
        yield worker, CPU
        return
    host = plan.host_of(worker)
    kind = plan.cluster.on(host).kind if plan.cluster is not None else ""
    for number in plan.devices[worker]:
        name = f"{host}:{number}" if host else f"gpu {number}"
        yield name, kind or "GPU"
