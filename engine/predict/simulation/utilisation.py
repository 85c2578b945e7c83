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

_ALL_THERE: Mapping[str, Sequence[tuple[float, float]]] = {}
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
    def told(self) -> float:
        """What is known of a node: the rest is others', or idle."""
        return self.busy + self.rows + self.weights

    def plus(self, other: TimeShares) -> None:
        """Add another's."""
        self.busy += other.busy
        self.rows += other.rows
        self.weights += other.weights
        self.others += other.others
        self.idle += other.idle

    def of(self, whole: float) -> TimeShares:
        """As shares of a whole."""
        part = 1.0 / whole if whole > 0 else 0.0
        found = (self.busy, self.rows, self.weights, self.others, self.idle)
        return TimeShares(*(seconds * part for seconds in found))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """Of all Workers of a node while they are there; its shares add up to 1. workers: the mean."""

    node: str
    workers: float
    shares: TimeShares


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Of one GPU, or of a Worker on cores; its shares add up to 1."""

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
        present: Mapping[str, Sequence[tuple[float, float]]] = _ALL_THERE,
    ) -> None:
        self._plan, self._whole = plan, end - start
        self._present = {
            worker: sum(max(0.0, min(last, end) - max(first, start)) for first, last in times)
            for worker, times in present.items()
        }
        """Worker -> seconds in which it was there."""
        by_worker: dict[str, list[SimulatedSpan]] = defaultdict(list)
        for span in spans:
            by_worker[span.worker].append(span)
        self._seconds: dict[str, Mapping[str, TimeShares]] = {
            worker: _seconds(sorted(own, key=lambda s: s.start), start, end)
            for worker, own in by_worker.items()
        }
        """Worker -> node -> seconds; under the empty name those of nodes that are none."""

    def nodes(self) -> Iterator[NodeUse]:
        """Each node of the plan, in its order."""
        totals = {worker: _sum(nodes.values()) for worker, nodes in self._seconds.items()}
        for node in self._plan.nodes:
            found = TimeShares()
            for worker in node.workers:
                own = self._seconds.get(worker, {}).get(node.name, TimeShares())
                told = totals.get(worker, TimeShares()).told
                found.plus(TimeShares(own.busy, own.rows, own.weights, told - own.told))
            seconds_there = sum(self._present.get(worker, self._whole) for worker in node.workers)
            found.idle = max(0.0, seconds_there - found.told - found.others)
            all_there = self._present.keys().isdisjoint(node.workers) or not self._whole
            count = len(node.workers) if all_there else seconds_there / self._whole
            yield NodeUse(node=node.name, workers=count, shares=found.of(seconds_there))

    def devices(self) -> Iterator[DeviceUse]:
        """Each device that some Worker has; those of several Workers have their shares together."""
        nodes: dict[str, list[str]] = defaultdict(list)
        for node in self._plan.nodes:
            for worker in node.workers:
                nodes[worker].append(node.name)
        on: dict[tuple[str, str], list[str]] = defaultdict(list)
        for worker in nodes:
            for device in _devices_of(self._plan, worker):
                on[device].append(worker)
        for (device, kind), workers in on.items():
            does = dict.fromkeys(name for worker in workers for name in nodes[worker])
            shares = self._together(workers)
            yield DeviceUse(device=device, kind=kind, nodes=tuple(does), shares=shares)

    def _together(self, workers: Sequence[str]) -> TimeShares:
        """Of Workers on the same device: while one computes, the others' waiting costs nothing."""
        each = [_sum(self._seconds.get(worker, {}).values()) for worker in workers]
        whole = self._whole
        busy = min(whole, sum(seconds.busy for seconds in each))
        rows = sum(seconds.rows for seconds in each)
        weights = sum(seconds.weights for seconds in each)
        idle = sum(max(0.0, whole - seconds.told) for seconds in each)
        waited = rows + weights + idle
        part = (whole - busy) / waited if waited > 0 else 0.0
        return TimeShares(busy, rows * part, weights * part, 0.0, idle * part).of(whole)


def _sum(each: Iterable[TimeShares]) -> TimeShares:
    found = TimeShares()
    for seconds in each:
        found.plus(seconds)
    return found


def _seconds(spans: Sequence[SimulatedSpan], start: float, end: float) -> dict[str, TimeShares]:
    """Of one Worker, by node; idle is what is left."""
    found: dict[str, TimeShares] = defaultdict(TimeShares)
    until = start
    for span in spans:
        seconds = found[span.node]
        begun, ended = max(span.start, until), min(span.end, end)
        gap = max(0.0, min(begun, end) - until)
        if span.what in _WEIGHTS:
            seconds.weights += gap
        elif span.what not in _ASIDE:
            seconds.rows += gap
        until = max(until, min(begun, end))
        if ended > until:
            _add_within(span, seconds, ended - until)
            until = ended
    return found


def _add_within(span: SimulatedSpan, found: TimeShares, seconds: float) -> None:
    """So many seconds of a span: all of it, but for what lies outside of the time that counts."""
    part = seconds / (span.end - span.start)
    if span.what in _WEIGHTS:
        found.weights += seconds
        return
    fetched = min(seconds, span.fetch * part)
    found.rows += fetched
    found.busy += min(seconds - fetched, span.busy * part)


def _devices_of(plan: Plan, worker: str) -> Iterator[tuple[str, str]]:
    """(name, kind) of each."""
    if worker not in plan.devices:
        yield worker, CPU
        return
    host = plan.host_of(worker)
    kind = plan.cluster.on(host).kind if plan.cluster is not None else ""
    for number in plan.devices[worker]:
        yield f"{host}:{number}" if host else f"gpu {number}", kind or "GPU"
