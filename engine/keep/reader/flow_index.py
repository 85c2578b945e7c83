"""The Flows of a run's `events/` folder: those of any Steps, their sum, the last seconds.

Owns: which segment has which Steps, and the sums of whole segments. Does not own: the files
(engine/keep/flow/segments.py), what a sum is (engine/watch/waits.py).

A segment is at most about 4 MiB, so that one is read whole. All that is kept of it is its first
Step, its sum and its lanes, each as long as the file is the same.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice

from engine.keep.flow.flow_sums import sum_flows
from engine.keep.flow.records import Flow, Lost, Record, Tombstones
from engine.keep.flow.segments import read_frames
from engine.keep.flow.stretch import SECONDS, last_seconds
from engine.keep.reader.open_folder import FileMark, OpenFolder, inside

EVENTS = "events"
_SEGMENT = re.compile(r"steps-[0-9]+\.seg")
_LIVE = re.compile(r"live-[0-9]\.seg")
_HEAD = 256
"""Bytes at the beginning of a live file that are compared."""
EVER = 2**62
"""A Step behind all Steps."""
_MOST_MISHAPS = 200
_AT_ONCE = 256
"""Flows that are summed at a time."""


class FlowIndex:
    """One run's records of flows. Its methods may be called by several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._segments: dict[str, FileMark] = {}
        self._first: dict[str, int] = {}
        self._sums: dict[str, list[Flow]] = {}

    def refresh(self, run: OpenFolder) -> list[str]:
        """Take note of changed files; the segments in order, those without a record left out."""
        with self._lock, inside(run, EVENTS) as folder:
            if folder is None:
                marks = {}
            else:
                marks = _marks(folder, _SEGMENT)
            for name in [n for n, mark in self._segments.items() if marks.get(n) != mark]:
                self._sums.pop(name, None)
                self._first.pop(name, None)
            for name in marks:
                if name not in self._first and folder is not None:
                    for record in islice(records(folder, name), 1):
                        self._first[name] = record.step
            self._segments = marks
            return [name for name in marks if name in self._first]

    def marks(self, run: OpenFolder) -> dict[str, FileMark]:
        """What tells whether a segment has changed, by name and in order."""
        with self._lock:
            return {name: self._segments[name] for name in self.refresh(run)}

    def between(self, run: OpenFolder, first: int, last: int) -> Iterator[Flow]:
        """The Flows of the Steps first..last, in order."""
        for name in self._overlapping(run, first, last):
            for record in self.of_segment(run, name):
                if isinstance(record, Flow) and first <= record.step <= last:
                    yield record

    def newest(self, run: OpenFolder) -> Flow | None:
        """Read the record of the last Step; None without any."""
        for name in reversed(self.refresh(run)):
            flows = [r for r in self.of_segment(run, name) if isinstance(r, Flow)]
            if flows:
                return flows[-1]
        return None

    def total(self, run: OpenFolder, first: int, last: int) -> Flow | None:
        """Add up the Steps first..last to one Flow; None where there are none."""
        parts: list[Flow] = []
        names = self._overlapping(run, first, last)
        for at, name in enumerate(names):
            if 0 < at < len(names) - 1:
                parts += self._whole(run, name)
            else:
                flows = (r for r in self.of_segment(run, name) if isinstance(r, Flow))
                parts += sum_in_parts(flow for flow in flows if first <= flow.step <= last)
        whole = sum_in_parts(iter(parts))
        return whole[0] if whole else None

    def of_segment(self, run: OpenFolder, name: str) -> Iterator[Record]:
        """Read the records of a segment, in order."""
        with inside(run, EVENTS) as folder:
            if folder is not None:
                yield from records(folder, name)

    def mishaps(self, run: OpenFolder) -> list[Lost | Tombstones]:
        """The newest losses of Workers and rows, the newest first; of the last segments alone."""
        mishaps: list[Lost | Tombstones] = []
        for name in reversed(self.refresh(run)[-8:]):
            of = [r for r in self.of_segment(run, name) if isinstance(r, Lost | Tombstones)]
            mishaps += reversed(of)
            if len(mishaps) >= _MOST_MISHAPS:
                break
        return mishaps[:_MOST_MISHAPS]

    def _whole(self, run: OpenFolder, name: str) -> list[Flow]:
        """The sum of a segment that lies within the Steps that are asked for."""
        with self._lock:
            if name not in self._sums:
                flows = (r for r in self.of_segment(run, name) if isinstance(r, Flow))
                self._sums[name] = sum_in_parts(flows)
            return self._sums[name]

    def _overlapping(self, run: OpenFolder, first: int, last: int) -> list[str]:
        """The segments that may have some of these Steps, in order."""
        with self._lock:
            names = self.refresh(run)
            starts = [self._first[name] for name in names]
        begin = max(0, bisect_right(starts, first - 1) - 1)
        return names[begin : bisect_right(starts, last)]


def sum_in_parts(flows: Iterator[Flow]) -> list[Flow]:
    """Their sum, of few at a time; nothing without any."""
    parts: list[Flow] = []
    for flow in flows:
        parts.append(flow)
        if len(parts) == _AT_ONCE:
            parts = [sum_flows(parts)]
    if parts:
        return [sum_flows(parts)]
    return []


def read_live_flows(run: OpenFolder) -> list[Flow]:
    """The Flows of the last seconds, in order; up to two minutes of them."""
    with inside(run, EVENTS) as folder:
        if folder is None:
            return []
        names = _marks(folder, _LIVE)
        flows: list[Flow] = []
        for name in names:
            flows += [record for record in records(folder, name) if isinstance(record, Flow)]
    return sorted(flows, key=lambda flow: flow.wall)


class LiveTail:
    """Reads the Flows of seconds as they come, each once, and keeps those of the last seconds."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[FileMark, int, bytes]] = {}
        self._flows: list[Flow] = []

    def advance(self, run: OpenFolder) -> Flow | None:
        """Take note of new ones; the last seconds as one Flow, None if there was no new one."""
        known = len(self._flows)
        with inside(run, EVENTS) as folder:
            if folder is not None:
                for name, mark in _marks(folder, _LIVE).items():
                    self._take(folder, name, mark)
        if len(self._flows) == known:
            return None
        self._flows.sort(key=lambda flow: flow.wall)
        end = self._flows[-1].wall
        self._flows = [flow for flow in self._flows if flow.wall > end - SECONDS]
        return last_seconds(self._flows)

    def _take(self, folder: OpenFolder, name: str, mark: FileMark) -> None:
        known, offset, began = self._read.get(name, (None, 0, b""))
        if known == mark:
            return
        begins = _beginning(folder, name)
        if known is None or begins != began or mark.size < known.size:
            offset = 0
        walls = {flow.wall for flow in self._flows}
        for record, end in _read_frames(folder, name, offset):
            offset = end
            if isinstance(record, Flow) and record.wall not in walls:
                self._flows.append(record)
        self._read[name] = (mark, offset, begins)


def _beginning(folder: OpenFolder, name: str) -> bytes:
    """The first bytes of a file, in which its first record's time is: they tell it from another."""
    file = folder.open(name)
    if file is None:
        return b""
    with file:
        return file.read(_HEAD)


def records(folder: OpenFolder, name: str) -> Iterator[Record]:
    """The whole records of a segment in an `events/` folder."""
    return (record for record, _ in _read_frames(folder, name, 0))


def _read_frames(folder: OpenFolder, name: str, offset: int) -> Iterator[tuple[Record, int]]:
    file = folder.open(name)  # which refuses all but a plain file of the folder's own
    if file is None:
        return
    with file:
        for each in read_frames(folder.path / name, offset):
            yield each.record, each.end


def _marks(folder: OpenFolder, named: re.Pattern[str]) -> dict[str, FileMark]:
    """What tells whether a file has changed, of each that is named so, in order."""
    names = [name for name in folder.names() if named.fullmatch(name)]
    return {name: mark for name in names if (mark := folder.mark(name)) is not None}
