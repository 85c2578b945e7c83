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
    """Of one run; each segment is kept as arrays. Several threads may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, LanePart] = {}

    def read(
        self, index: FlowIndex, run: OpenFolder, first: int, last: int, points: int
    ) -> dict[str, Any]:
        """The lanes of the Steps first..last, at most `points` (and MOST) of each."""
        with self._lock:
            parts = self._refresh(index, run)
            steps = np.concatenate([np.empty(0, np.int64), *(p.steps for p in parts)])
            wanted = (steps >= first) & (steps <= last)
            cuts = _cuts(int(wanted.sum()), max(1, min(points, MOST)))
            if not len(cuts):
                return {"workers": {}}
            lengths = np.concatenate([part.length for part in parts])
            length = _summed(lengths[wanted], cuts)
            ends = steps[wanted][np.append(cuts[1:], wanted.sum()) - 1]
            workers: set[str] = set()
            for part in parts:
                workers.update(part.seconds)
            lanes: dict[str, Any] = {}
            for worker in sorted(workers):
                lanes[worker] = _lane(parts, worker, wanted, cuts, length, ends)
            return {"workers": lanes}

    def _refresh(self, index: FlowIndex, run: OpenFolder) -> list[LanePart]:
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
    stretches = list(flows)
    length = np.array([flow.end - flow.start for flow in stretches], np.float32)
    busy, waited = _columns(stretches)
    by_worker: dict[str, list[str]] = defaultdict(list)
    for key in busy:
        by_worker[key.rpartition("@")[2]].append(key)
    return LanePart(
        mark=mark,
        steps=np.array([flow.step for flow in stretches], np.int64),
        length=length,
        seconds={w: _seconds(keys, busy, waited, length) for w, keys in by_worker.items()},
    )


def _columns(flows: list[Flow]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Seconds busy, and seconds that it waited, of each replica by Flow."""
    empty = [0.0] * len(flows)
    busy: dict[str, list[float]] = {}
    waited: dict[str, list[float]] = {}
    for at, flow in enumerate(flows):
        for key, r in flow.nodes.items():
            if key not in busy:
                busy[key], waited[key] = empty.copy(), empty.copy()
            busy[key][at] = r.busy
            waited[key][at] = r.for_rows + r.for_weights + r.for_turn + r.for_room
    return _as_arrays(busy), _as_arrays(waited)


def _as_arrays(seconds: dict[str, list[float]]) -> dict[str, np.ndarray]:
    return {replica: np.array(numbers, np.float32) for replica, numbers in seconds.items()}


def _seconds(
    keys: list[str],
    busy: dict[str, np.ndarray],
    waited: dict[str, np.ndarray],
    length: np.ndarray,
) -> dict[str, np.ndarray]:
    """A Worker's busy seconds by node, waiting and idle."""
    worked = np.sum([busy[key] for key in keys], axis=0)
    rest = np.maximum(length - worked, 0)
    alone = [waited[key] - (worked - busy[key]) for key in keys]
    waits = np.clip(np.max(alone, axis=0), 0, rest)
    return {key.rpartition("@")[0]: busy[key] for key in keys} | {WAITS: waits, IDLE: rest - waits}


def _cuts(count: int, points: int) -> np.ndarray:
    """Where buckets begin."""
    return np.linspace(0, count, min(count, points), endpoint=False).astype(np.int64)


def _seconds_of(part: LanePart, worker: str, name: str) -> np.ndarray:
    """float32 by Step; zeros where the Worker has no such node in this part."""
    seconds = part.seconds.get(worker, {}).get(name)
    if seconds is None:
        return np.zeros(len(part.steps), np.float32)
    return seconds


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
    names: dict[str, None] = {}
    for part in parts:
        names |= dict.fromkeys(part.seconds.get(worker, {}))
    shares: dict[str, list[float]] = {}
    for name in names:
        whole = np.concatenate([_seconds_of(part, worker, name) for part in parts])
        seconds = _summed(whole[wanted], cuts)
        share = np.divide(seconds, length, out=np.zeros_like(seconds), where=length > 0)
        shares[name] = np.round(np.clip(share, 0, 1), 4).tolist()
    none = [0.0] * len(cuts)
    waits, idle = shares.pop(WAITS, none), shares.pop(IDLE, none)
    return {"steps": ends.tolist(), "busy": shares, "waits": waits, "idle": idle}
