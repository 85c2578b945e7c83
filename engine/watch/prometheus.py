"""The newest figures of runs as Prometheus text.

Owns: the names and labels of these metrics, and the totals behind their counters. Does not own: the
figures (engine/keep/flow/records.py, docs/metrics.md), who may ask for them (the server of
`dataflow watch`).

Counters are sums over the Steps that have ended, so they only grow; after a resume that cut Steps
off they begin anew, as Prometheus expects of a process that restarts. Gauges are of the last second
or, of a run that has ended, of its last Step. Needs the extra `ui`.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.keep.flow.records import Flow, Lost, Record, Tombstones
from engine.keep.flow.segments import read_frames, read_live, step_segments
from engine.keep.metrics.metric_lines import finite
from engine.keep.reader.open_folder import open_run
from engine.keep.reader.run_summary import last_row

Labels = tuple[str, ...]
_Sums = dict[tuple[str, Labels], float]
"""By metric and labels."""

_STATES = ("busy", "for_rows", "for_weights", "for_turn", "for_room", "for_outside", "idle")

_HELP: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "node_seconds": ("Seconds of a node in a Worker, by what it did.", ("node", "worker", "state")),
    "node_chunks": ("Calls of a node's kernel that have ended.", ("node", "worker")),
    "node_rows": ("Rows that a node made, or trained.", ("node", "worker")),
    "node_tokens": ("Tokens that a node made, or trained.", ("node", "worker")),
    "node_version": ("Version of the weights that a node has.", ("node", "worker")),
    "node_device_peak_bytes": ("Most bytes on a node's GPU while it computed.", ("node", "worker")),
    "node_rows_in_flight": ("Rows that a node has in flight, as episodes.", ("node", "worker")),
    "edge_rows": ("Rows that the consumer took.", ("edge",)),
    "edge_bytes": ("Bytes that the consumer took.", ("edge",)),
    "edge_waiting_rows": ("Rows made and not yet taken.", ("edge",)),
    "edge_waiting_bytes": ("Bytes of the rows not yet taken.", ("edge",)),
    "edge_age_seconds": ("Age of the oldest row not yet taken.", ("edge",)),
    "weights_loads": ("Versions that a reader loaded.", ("model", "node", "worker")),
    "weights_seconds": ("Seconds of these loads.", ("model", "node", "worker")),
    "weights_bytes": ("Bytes of these loads.", ("model", "node", "worker")),
    "weights_offered_version": ("Newest version of the writer.", ("model", "node", "worker")),
    "weights_loaded_version": ("Version that the reader has.", ("model", "node", "worker")),
    "weights_lag_versions": ("Versions that the reader is behind.", ("model", "node", "worker")),
    "cut_ready_prompts": ("Finished prompts that are in no Step yet.", ("node",)),
    "cut_wanted_prompts": ("Prompts of a Step.", ("node",)),
    "cut_outstanding_prompts": ("Prompts admitted and not retired.", ("node",)),
    "cut_room_prompts": ("Most prompts that may be outstanding.", ("node",)),
    "trained_rows": ("Trained rows, by how many versions old they were.", ("node", "lag")),
    "worker_memory_bytes": ("Resident memory of a Worker's process.", ("worker",)),
    "worker_peak_bytes": ("Most resident memory since it began.", ("worker",)),
    "worker_outbox_bytes": ("Rows that a Worker keeps for others.", ("worker",)),
    "worker_device_bytes": ("Bytes allocated on a Worker's GPU.", ("worker",)),
    "worker_device_peak_bytes": ("Most bytes allocated on it.", ("worker",)),
    "workers_lost": ("Workers' processes that were lost.", ("worker",)),
    "tombstones": ("Rows that failed for good, or were given up.", ("node",)),
    "step": ("Steps that have ended.", ()),
    "last_record_timestamp_seconds": ("When the run last wrote a figure, Unix time.", ()),
    "metric": ("A metric of the last Step (docs/metrics.md).", ("metric",)),
}
"""Metric without `dataflow_` -> what it says, labels after run and graph."""


def exposition(folders: Iterable[Path] | Mapping[str, Path]) -> bytes:
    """The figures of these run folders, in the text format. For several threads. A mapping says by
    which names runs are labelled; else those of their folders count.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunsCollector(folders))
    return generate_latest(registry)


class RunsCollector(Collector):
    """Makes the metrics of run folders whenever it is asked."""

    def __init__(self, folders: Iterable[Path] | Mapping[str, Path]) -> None:
        if isinstance(folders, Mapping):
            named = folders
        else:
            named = {path.name: path for path in folders}
        self._folders = dict(named)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        counters: dict[str, CounterMetricFamily] = {}
        gauges: dict[str, GaugeMetricFamily] = {}
        for name, folder in self._folders.items():
            run_labels = (name, _graph(folder))
            events = folder / "events"
            last, totals = _follow_run(events)
            for figure, labels, number in totals:
                family = _family(counters, CounterMetricFamily, figure)
                family.add_metric([*run_labels, *labels], number)
            # Of a run that has ended the last Step is newer than the last second.
            newest = [*read_live(events)[-1:], *last]
            flow = max(newest, key=lambda each: each.wall, default=None)
            for figure, labels, number in _newest(folder, flow):
                family = _family(gauges, GaugeMetricFamily, figure)
                family.add_metric([*run_labels, *labels], number)
        yield from counters.values()
        yield from gauges.values()


def _family(families: dict[str, Any], kind: Any, name: str) -> Any:
    """The family of a metric; a new one for its first figure."""
    if name not in families:
        about, labels = _HELP[name]
        families[name] = kind(f"dataflow_{name}", about, labels=("run", "graph", *labels))
    return families[name]


def _graph(folder: Path) -> str:
    """The graph's name in plan.json; empty where there is none."""
    try:
        plan = json.loads((folder / "plan.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    if isinstance(plan, dict):
        return str(plan.get("graph", ""))
    return ""


# --- gauges ---------------------------------------------------------------------------------------

_Figure = tuple[str, Labels, float]


def _newest(folder: Path, flow: Flow | None) -> Iterator[_Figure]:
    """List the figures of the last Step's row, and of the last record of flows."""
    with open_run(folder, guarded=True) as opened:
        row = last_row(opened)
    yield "step", (), float(row.get("step", 0))
    for name, metric in row.items():
        number = finite(metric)
        if name != "step" and number is not None:
            yield "metric", (name,), number
    if flow is not None:
        yield "last_record_timestamp_seconds", (), flow.wall
        yield from _of_nodes(flow)
        yield from _of_edges(flow)
        yield from _of_cuts(flow)
        yield from _of_workers(flow)


def _of_nodes(flow: Flow) -> Iterator[_Figure]:
    for key, replica in flow.nodes.items():
        node, _, worker = key.partition("@")
        if replica.version >= 0:
            yield "node_version", (node, worker), replica.version
        if replica.device_peak:
            yield "node_device_peak_bytes", (node, worker), replica.device_peak
        if replica.in_flight:
            yield "node_rows_in_flight", (node, worker), replica.in_flight


def _of_edges(flow: Flow) -> Iterator[_Figure]:
    for key, edge in flow.edges.items():
        yield "edge_waiting_rows", (key,), edge.waiting_rows
        yield "edge_waiting_bytes", (key,), edge.waiting_bytes
        yield "edge_age_seconds", (key,), edge.age
    for key, weights in flow.weights.items():
        place = _reader(key)
        yield "weights_offered_version", place, weights.offered
        yield "weights_loaded_version", place, weights.loaded
        yield "weights_lag_versions", place, max(0, weights.offered - weights.loaded)


def _reader(key: str) -> Labels:
    """Model, reader and Worker of a weight edge."""
    model, _, reader = key.partition("->")
    node, _, worker = reader.partition("@")
    return model, node, worker


def _of_cuts(flow: Flow) -> Iterator[_Figure]:
    for source, cut in flow.cuts.items():
        yield "cut_ready_prompts", (source,), cut.ready
        yield "cut_wanted_prompts", (source,), cut.wanted
        yield "cut_outstanding_prompts", (source,), cut.outstanding
        yield "cut_room_prompts", (source,), cut.room


def _of_workers(flow: Flow) -> Iterator[_Figure]:
    for name, worker in flow.workers.items():
        yield "worker_memory_bytes", (name,), worker.memory
        yield "worker_peak_bytes", (name,), worker.peak
        yield "worker_outbox_bytes", (name,), worker.outbox
        if worker.device_peak:
            yield "worker_device_bytes", (name,), worker.device
            yield "worker_device_peak_bytes", (name,), worker.device_peak


# --- counters -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Totals:
    """What the records of one run's Steps add up to, as far as they were read. read: by segment,
    the end of its last whole frame.
    """

    sums: _Sums = field(default_factory=lambda: defaultdict(float))
    last: Flow | None = None
    read: dict[str, int] = field(default_factory=dict)

    def follow(self, events: Path) -> bool:
        """Read what has come; whether the files only grew since the last time."""
        segments = {path.name: path for path in step_segments(events)}
        if not self.read.keys() <= segments.keys():
            return False
        for name, path in segments.items():
            before = self.read.get(name, 0)
            size = path.stat().st_size
            end = before
            for frame in read_frames(path, before):
                end = frame.end
                self._add(frame.record)
            # Longer, and no whole frame where the last one ended: it may be another file of that
            # name, which a resume began.
            is_another = bool(before) and end == before < size
            if size < before or is_another:
                return False
            self.read[name] = end
        return True

    def _add(self, record: Record) -> None:
        match record:
            case Flow():
                self.last = record
                for name, labels, number in _list_additions(record):
                    self.sums[name, labels] += number
            case Lost():
                self.sums["workers_lost", (record.worker,)] += 1
            case Tombstones():
                self.sums["tombstones", (record.node,)] += len(record.keys)


_MOST = 64
"""Runs whose totals are remembered."""
_known: dict[tuple[int, int], _Totals] = {}
"""By device and inode of the folder of events, whatever its path."""
_lock = threading.Lock()
"""Held while totals are read or changed: a server asks from several threads."""


def _follow_run(events: Path) -> tuple[list[Flow], list[_Figure]]:
    """The last Step's record, if there is one, and all totals, brought up to date; read from the
    beginning where a resume has cut the files.
    """
    if not events.is_dir():
        return [], []
    status = events.stat()
    with _lock:
        state = _known.pop((status.st_dev, status.st_ino), _Totals())
        if not state.follow(events):
            state = _Totals()
            state.follow(events)
        _known[status.st_dev, status.st_ino] = state
        while len(_known) > _MOST:
            oldest = next(iter(_known))
            del _known[oldest]
        figures: list[_Figure] = []
        for (name, labels), number in sorted(state.sums.items()):
            figures.append((name, labels, number))
        last = [] if state.last is None else [state.last]
        return last, figures


def _list_additions(flow: Flow) -> Iterator[_Figure]:
    """List what a Step adds to the totals."""
    for key, replica in flow.nodes.items():
        node, _, worker = key.partition("@")
        for state in _STATES:
            yield "node_seconds", (node, worker, state), getattr(replica, state)
        for what in ("chunks", "rows", "tokens"):
            yield f"node_{what}", (node, worker), getattr(replica, what)
    for key, edge in flow.edges.items():
        yield "edge_rows", (key,), edge.rows
        yield "edge_bytes", (key,), edge.bytes
    for key, weights in flow.weights.items():
        for what in ("loads", "seconds", "bytes"):
            yield f"weights_{what}", _reader(key), getattr(weights, what)
    for source, cut in flow.cuts.items():
        for lag, rows in enumerate(cut.lags):
            yield "trained_rows", (source, str(lag)), rows
