"""A lane for each Worker over the Steps: its shares of time at work, waiting, idle.

Owns: these shares, and their thinning. Does not own: the seconds (engine/observe/flow/records.py).

A Worker does one thing at a time: it is busy with one of its nodes, else it waits if any of them
does. What a node waits for its turn while another one of its Worker is busy is no wait of the
Worker's.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.observe.flow.records import Flow, ReplicaFlow
from engine.watch.flow_index import FlowIndex
from engine.watch.opened import FileMark, OpenFolder

MOST = 500
"""Points of a lane."""

_Seconds = dict[str, dict[str, float]]
"""By Worker: busy seconds by node, and `waits` and `idle` under names that no node has."""
WAITS, IDLE = "/waits", "/idle"


@dataclass(slots=True)
class LanePart:
    """The lanes of one segment: seconds by Step, as float32."""

    mark: FileMark
    steps: np.ndarray
    length: np.ndarray
    seconds: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)


class Lanes:
    """Of one run; each segment is kept as arrays. Several threads may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, LanePart] = {}

    def read(
        self, index: FlowIndex, run: OpenFolder, first: int, last: int, points: int
    ) -> dict[str, Any]:
        """The lanes of the Steps first..last, at most `points` (and MOST) of each."""
        with self._lock:
            parts = self._refreshed(index, run)
            steps = np.concatenate([np.empty(0, np.int64), *(p.steps for p in parts)])
            wanted = (steps >= first) & (steps <= last)
            cuts = _cuts(int(wanted.sum()), max(1, min(points, MOST)))
            if not len(cuts):
                return {"workers": {}}
            length = _summed(np.concatenate([p.length for p in parts])[wanted], cuts)
            ends = steps[wanted][np.append(cuts[1:], wanted.sum()) - 1]
            return {
                "workers": {
                    worker: _lane(parts, worker, wanted, cuts, length, ends)
                    for worker in sorted({w for part in parts for w in part.seconds})
                }
            }

    def _refreshed(self, index: FlowIndex, run: OpenFolder) -> list[LanePart]:
        marks = index.marks(run)
        for name in [n for n, part in self._parts.items() if marks.get(n) != part.mark]:
            del self._parts[name]
        for name, mark in marks.items():
            if name not in self._parts:
                flows = (r for r in index.of_segment(run, name) if isinstance(r, Flow))
                self._parts[name] = lane_part(mark, flows)
        return [self._parts[name] for name in marks]


def lane_part(mark: FileMark, flows: Iterable[Flow]) -> LanePart:
    """The lanes of these Flows."""
    rows = [(flow.step, flow.end - flow.start, dict(_seconds(flow))) for flow in flows]
    found: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for at, (_, _, of_workers) in enumerate(rows):
        for worker, seconds in of_workers.items():
            lane = found[worker]
            for name, value in seconds.items():
                if name not in lane:
                    lane[name] = np.zeros(len(rows), np.float32)
                lane[name][at] = value
    return LanePart(
        mark=mark,
        steps=np.array([step for step, _, _ in rows], np.int64),
        length=np.array([length for _, length, _ in rows], np.float32),
        seconds=dict(found),
    )


def _seconds(flow: Flow) -> Iterator[tuple[str, dict[str, float]]]:
    """(Worker, its seconds by node, waiting and idle)."""
    by_worker: dict[str, dict[str, ReplicaFlow]] = defaultdict(dict)
    for key, replica in flow.nodes.items():
        node, _, worker = key.rpartition("@")
        by_worker[worker][node] = replica
    for worker, nodes in by_worker.items():
        busy = {node: replica.busy for node, replica in nodes.items() if replica.busy}
        rest = max(0.0, flow.end - flow.start - sum(busy.values()))
        waits = min(rest, max(_waited(r, sum(busy.values())) for r in nodes.values()))
        yield worker, busy | {WAITS: waits, IDLE: rest - waits}


def _waited(replica: ReplicaFlow, busy: float) -> float:
    """Seconds that a node waits while its Worker does nothing. busy: the Worker's."""
    waited = replica.for_rows + replica.for_weights + replica.for_turn + replica.for_room
    return max(0.0, waited - (busy - replica.busy))


def _cuts(count: int, points: int) -> np.ndarray:
    """Where buckets begin."""
    return np.linspace(0, count, min(count, points), endpoint=False).astype(np.int64)


def _summed(values: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values.astype(np.float64), cuts)


def _lane(
    parts: list[LanePart],
    worker: str,
    wanted: np.ndarray,
    cuts: np.ndarray,
    length: np.ndarray,
    ends: np.ndarray,
) -> dict[str, Any]:
    names = dict.fromkeys(n for part in parts for n in part.seconds.get(worker, {}))
    shares: dict[str, list[float]] = {}
    for name in names:
        whole = [
            part.seconds.get(worker, {}).get(name, np.zeros(len(part.steps), np.float32))
            for part in parts
        ]
        seconds = _summed(np.concatenate(whole)[wanted], cuts)
        share = np.divide(seconds, length, out=np.zeros_like(seconds), where=length > 0)
        shares[name] = np.round(np.clip(share, 0, 1), 4).tolist()
    none = [0.0] * len(cuts)
    waits, idle = shares.pop(WAITS, none), shares.pop(IDLE, none)
    return {"steps": ends.tolist(), "busy": shares, "waits": waits, "idle": idle}
