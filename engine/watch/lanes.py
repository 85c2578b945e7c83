"""A lane for each Worker over the Steps: its shares of time at work, waiting, idle.

Owns: these shares, and their thinning. Does not own: the seconds (engine/keep/flow/records.py).

A Worker does one thing at a time: it is busy with one of its nodes, else it waits if any of them
does. What a node waits for its turn while another one of its Worker is busy is no wait of the
Worker's.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.keep.flow.records import Flow
from engine.keep.reader.flow_index import FlowIndex
from engine.keep.reader.open_folder import FileMark, OpenFolder
from engine.watch.critical_path import sum_waits

MOST = 500
"""Points of a lane."""

WAITS, IDLE = "/waits", "/idle"
"""Stand beside the names of nodes, and are none."""


@dataclass(slots=True)
class LanePart:
    """The lanes of one segment: seconds by Step, as float32."""

    mark: FileMark
    steps: np.ndarray
    length: np.ndarray
    seconds: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)


class Lanes:
    """One run's lanes; each segment is kept as arrays. Several threads may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, LanePart] = {}

    def read(
        self, index: FlowIndex, run: OpenFolder, first: int, last: int, points: int
    ) -> dict[str, Any]:
        """The lanes of the Steps first..last, at most `points` (and MOST) of each."""
        with self._lock:
            parts = self._refresh(index, run)
            part_steps = [part.steps for part in parts]
            # Of a run without Flows there is nothing else to join.
            steps = np.concatenate([np.empty(0, np.int64), *part_steps])
            wanted = (steps >= first) & (steps <= last)
            count = int(wanted.sum())
            cuts = _cuts(count, max(1, min(points, MOST)))
            if not len(cuts):
                return {"workers": {}}
            lengths = np.concatenate([part.length for part in parts])
            length = _sum_buckets(lengths[wanted], cuts)
            # A bucket stands at its last Step.
            last_places = np.append(cuts[1:], count) - 1
            ends = steps[wanted][last_places]
            workers: set[str] = set()
            for part in parts:
                workers.update(part.seconds)
            lanes: dict[str, Any] = {}
            for worker in sorted(workers):
                lanes[worker] = _make_lane(parts, worker, wanted, cuts, length, ends)
            return {"workers": lanes}

    def _refresh(self, index: FlowIndex, run: OpenFolder) -> list[LanePart]:
        """Read the segments that are new or have changed since the last time."""
        marks = index.marks(run)
        for name, part in list(self._parts.items()):
            if marks.get(name) != part.mark:
                del self._parts[name]
        for name, mark in marks.items():
            if name not in self._parts:
                flows = (r for r in index.of_segment(run, name) if isinstance(r, Flow))
                self._parts[name] = lane_part(mark, flows)
        return [self._parts[name] for name in marks]


def lane_part(mark: FileMark, flows: Iterable[Flow]) -> LanePart:
    """Add up the lanes of these Flows."""
    stretches = list(flows)
    steps = [flow.step for flow in stretches]
    lengths = [flow.end - flow.start for flow in stretches]
    length = np.array(lengths, np.float32)
    busy, waited = _columns(stretches)
    keys_by_worker: dict[str, list[str]] = defaultdict(list)
    for key in busy:
        _, _, worker = key.rpartition("@")
        keys_by_worker[worker].append(key)
    seconds: dict[str, dict[str, np.ndarray]] = {}
    for worker, keys in keys_by_worker.items():
        seconds[worker] = _add_up(keys, busy, waited, length)
    return LanePart(mark=mark, steps=np.array(steps, np.int64), length=length, seconds=seconds)


def _columns(flows: list[Flow]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Seconds busy, and seconds that it waited, of each replica by Flow."""
    empty = [0.0] * len(flows)
    busy: dict[str, list[float]] = {}
    waited: dict[str, list[float]] = {}
    for place, flow in enumerate(flows):
        for key, replica in flow.nodes.items():
            if key not in busy:
                busy[key] = empty.copy()
                waited[key] = empty.copy()
            busy[key][place] = replica.busy
            waited[key][place] = sum_waits(replica)
    return _as_arrays(busy), _as_arrays(waited)


def _as_arrays(seconds: dict[str, list[float]]) -> dict[str, np.ndarray]:
    return {replica: np.array(numbers, np.float32) for replica, numbers in seconds.items()}


def _add_up(
    keys: list[str],
    busy: dict[str, np.ndarray],
    waited: dict[str, np.ndarray],
    length: np.ndarray,
) -> dict[str, np.ndarray]:
    """A Worker's busy seconds by node, waiting and idle."""
    worked = np.sum([busy[key] for key in keys], axis=0)
    rest = np.maximum(length - worked, 0)
    # While another node of the Worker is busy, a node's wait is none of the Worker's.
    own_waits = [waited[key] - (worked - busy[key]) for key in keys]
    waits = np.clip(np.max(own_waits, axis=0), 0, rest)
    seconds: dict[str, np.ndarray] = {}
    for key in keys:
        node, _, _ = key.rpartition("@")
        seconds[node] = busy[key]
    seconds[WAITS] = waits
    seconds[IDLE] = rest - waits
    return seconds


def _cuts(count: int, points: int) -> np.ndarray:
    """Where buckets begin."""
    buckets = min(count, points)
    return np.linspace(0, count, buckets, endpoint=False).astype(np.int64)


def _seconds_of(part: LanePart, worker: str, name: str) -> np.ndarray:
    """float32 by Step; zeros where the Worker has no such node in this part."""
    seconds = part.seconds.get(worker, {}).get(name)
    if seconds is None:
        return np.zeros(len(part.steps), np.float32)
    return seconds


def _sum_buckets(values: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    # float64: thousands of float32 seconds add up.
    return np.add.reduceat(values.astype(np.float64), cuts)


def _make_lane(
    parts: list[LanePart],
    worker: str,
    wanted: np.ndarray,
    cuts: np.ndarray,
    length: np.ndarray,
    ends: np.ndarray,
) -> dict[str, Any]:
    """A Worker's shares by bucket. length: of each bucket, in seconds; ends: its Step."""
    names: dict[str, None] = {}
    for part in parts:
        names |= dict.fromkeys(part.seconds.get(worker, {}))
    shares: dict[str, list[float]] = {}
    for name in names:
        whole = np.concatenate([_seconds_of(part, worker, name) for part in parts])
        seconds = _sum_buckets(whole[wanted], cuts)
        share = np.divide(seconds, length, out=np.zeros_like(seconds), where=length > 0)
        rounded = np.round(np.clip(share, 0, 1), 4)
        shares[name] = rounded.tolist()
    none = [0.0] * len(cuts)
    waits = shares.pop(WAITS, none)
    idle = shares.pop(IDLE, none)
    return {"steps": ends.tolist(), "busy": shares, "waits": waits, "idle": idle}
