"""A timeline of the run as Chrome-trace JSON, the format that Perfetto and torch's profiler share.

Owns: the file's form. Does not own: what is worth a span, which spans an arrow joins (arrows.py),
nor clocks: callers give every time, in seconds of one clock (`time.monotonic` is one for a whole
host).

The file is a JSON array, one event a line, that grows by whole lines. Its closing bracket may be
missing, so a file is good after a kill. Format: "Trace Event Format", Google, sections "JSON Array
Format", "Event Descriptions" and "Flow Events". Both ends of an arrow lie in the spans that it
joins, and its lines come after theirs: a reader that sorts by time, and keeps the order of equal
times, finds the spans open.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from dataflow.errors import DataError
from dataflow.storage import storage_error, writing
from engine.keep.append_log import AppendLog
from engine.keep.trace.arrows import Arrow, Arrows, JoinedSpan
from engine.protocol import messages as m
from engine.protocol.events import (
    EventHeard,
    InstructionTold,
    RunEvent,
    WorkersMeasured,
    WritingEnded,
)

_log = logging.getLogger(__name__)

_INSIDE = 1e-6
"""Seconds before its end at which an arrow leaves a span: at the end the span is closed."""

_BUFFERED = 1024
"""Events kept in memory before they are written; a kill loses these."""
_SECOND = 0.95
"""Seconds for which events of the run are kept at most as they came."""


class _Event(NamedTuple):
    """own: its kind's own fields."""

    track: str
    name: str
    at: float
    fields: dict[str, Any]
    args: dict[str, Any]


class _Ends(NamedTuple):
    """Where an arrow leaves, and where it comes."""

    number: int
    kind: str
    source: str
    leaves: float
    target: str
    comes: float


class Trace:
    """Writes one trace file, for several threads. A failed write is logged once and ends the trace,
    not the run. Opening truncates: a resumed run takes another file.

    A track is `process/thread` (`worker0/decode`), or `thread` alone for this process; it is one
    row in the viewer. Spans of one track must nest or follow one another.
    """

    takes = (
        *(WorkersMeasured, WritingEnded, m.WorkerLost, m.Retire, m.Release, m.Rollback),
        *get_args(m.Task),
        *get_args(m.TaskEnd),
    )

    def __init__(self, path: Path, *, process: str = "coordinator", first: int = 0) -> None:
        """first: Steps of the run before this graph's own."""
        self._process = process
        self._arrows = Arrows(first=first)
        self._number = 0
        """Of the last arrow."""
        self._path = path
        with writing("the trace", path):
            self._file: AppendLog | None = AppendLog(path, empty=True)
        self._events: deque[_Event | _Ends] = deque()
        self._tracks: dict[str, tuple[int, int]] = {}
        self._processes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._empty = True
        self._kept: list[RunEvent] = []
        self._joined_at = -math.inf

    def take(self, event: RunEvent) -> None:
        """Of a run: spans of Workers, checkpoints, deaths (see `engine.protocol.events`).

        They are kept, and joined about once a second: many in a row take half as long as each alone
        between two kernels.
        """
        self._kept.append(event)
        if isinstance(event, WritingEnded):
            self.flush()
        elif isinstance(event, WorkersMeasured) and event.at - self._joined_at >= _SECOND:
            self._joined_at = event.at
            self._join()

    def _join(self) -> None:
        """Make events of the file of all that was kept."""
        events, self._kept = self._kept, []
        for event in events:
            self._take(event)

    def _take(self, event: RunEvent) -> None:
        match event:
            case InstructionTold(instruction=m.Retire(workers=workers)):
                for worker in workers:
                    self._arrows.lose(worker, event.at)
                    self.instant(f"{worker}/left", "left", event.at)
            case InstructionTold(instruction=told):
                self._arrows.note_instruction(told)
            case EventHeard(event=m.WorkerLost(worker=worker, error=error) as lost):
                self._arrows.note_event(lost, event.at)
                self.instant(f"{worker}/lost", "lost", event.at, error=error)
            case EventHeard(event=ended):
                self._arrows.note_event(ended, event.at)
            case WorkersMeasured():
                self.show(self._arrows.join_spans(event.spans))
            case WritingEnded(of=m.Checkpoint(step=step)):
                self.span("checkpoint", "checkpoint", event.start, event.end, step=step)

    def show(self, joined: Sequence[JoinedSpan]) -> None:
        """Spans, and then the arrows that end in them."""
        for each in joined:
            span = each.span
            self.span(span.track, span.name, span.start, span.end, **each.args)
        for each in joined:
            for arrow in each.arrows:
                self._arrow(arrow)

    def _arrow(self, arrow: Arrow) -> None:
        """Draw an arrow from the last moment of its source at which the target has not begun."""
        source, target = arrow.source, arrow.target
        at = max(source.start, min(source.end - _INSIDE, target.start))
        self._number += 1
        self._add(_Ends(self._number, arrow.kind, source.track, at, target.track, target.start))

    def span(self, track: str, name: str, start: float, end: float, **args: Any) -> None:
        """Something that lasted from start to end, in seconds."""
        whole = round(_us(end) - _us(start), 3)  # of rounded times, so that no end passes a start
        self._add(_Event(track, name, start, {"ph": "X", "dur": whole}, args))

    def instant(self, track: str, name: str, at: float, **args: Any) -> None:
        """A moment: a publish, a death."""
        self._add(_Event(track, name, at, {"ph": "i", "s": "t"}, args))

    def _add(self, event: _Event | _Ends) -> None:
        self._events.append(event)
        if len(self._events) >= _BUFFERED:
            self._write_events()

    def flush(self) -> None:
        """Hand the events so far to the operating system, in one write. Also what the run's thread
        has kept, so that only this thread may call it.
        """
        self._join()
        self._write_events()

    def _write_events(self) -> None:
        with self._lock:
            if self._file is None:
                self._events.clear()
                return
            events = [self._events.popleft() for _ in range(len(self._events))]
            lines: list[bytes] = []
            for event in events:
                lines += self._encode(event)
            if lines:
                self._write((b"[\n" if self._empty else b",\n") + b",\n".join(lines))
                self._empty = False

    def close(self) -> None:
        """Flush, close the array and the file. A second call does nothing."""
        self.flush()
        with self._lock:
            if self._file is not None:
                self._write(b"[\n]\n" if self._empty else b"\n]\n")
            if self._file is not None:  # else it has just failed
                self._file.close()
                self._file = None

    def _write(self, text: bytes) -> None:
        assert self._file is not None
        try:
            self._file.append(text)
        except OSError as error:
            problem = storage_error("the trace", self._path, error, len(text))
            _log.warning("%s The run goes on without a trace.", problem)
            self._events.clear()
            self._file.close()
            self._file = None

    def _encode(self, event: _Event | _Ends) -> list[bytes]:
        """The event's lines, after the lines that name its track where it is new."""
        if isinstance(event, _Ends):
            return self._encode_ends(event)
        track, name, at, fields, args = event
        if track in self._tracks:
            lines = []
        else:
            lines = self._name(track)
        pid, tid = self._tracks[track]
        line = {**fields, "name": name, "ts": _us(at), "pid": pid, "tid": tid}
        if args:
            line["args"] = args
        return [*lines, msgspec.json.encode(line, enc_hook=str)]

    def _encode_ends(self, ends: _Ends) -> list[bytes]:
        """Both of an arrow, in one piece, so that a kill leaves none with one end. Its spans have
        named the tracks.
        """
        number, kind, leaves, at, comes, start = ends
        (pid, tid), (to_pid, to_tid) = self._tracks[leaves], self._tracks[comes]
        same = f'"id":{number},"cat":"{kind}","name":"{kind}"'
        one = f'{{"ph":"s",{same},"ts":{_us(at)},"pid":{pid},"tid":{tid}}}'
        other = f'{{"ph":"f","bp":"e",{same},"ts":{_us(start)},"pid":{to_pid},"tid":{to_tid}}}'
        return [f"{one},\n{other}".encode()]

    def _name(self, track: str) -> list[bytes]:
        """Number a new track; returns the metadata events that name it."""
        process, slash, thread = track.partition("/")
        if not slash:
            process, thread = self._process, track
        lines = []
        pid = self._processes.get(process)
        if pid is None:
            pid = self._processes[process] = len(self._processes) + 1
            lines.append(_metadata("process_name", pid, 0, process))
        tid = len(self._tracks) + 1
        self._tracks[track] = (pid, tid)
        return [*lines, _metadata("thread_name", pid, tid, thread)]


def _metadata(kind: str, pid: int, tid: int, name: str) -> bytes:
    line = {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
    return msgspec.json.encode(line)


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read all events of a trace, even of a killed writer. Raises DataError for other files."""
    text = path.read_text(encoding="utf-8").rstrip()
    if text.endswith("\n]"):
        body = text.removesuffix("\n]")
    else:
        body = _without_torn_line(text)
    try:
        if text:
            return json.loads(body + "\n]")
        return []
    except json.JSONDecodeError as error:
        problem = f"expected a trace, found {text[:40]!r} ({error})"
        raise DataError(f"{path}: {problem}. Fix: record it again.") from error


def _without_torn_line(text: str) -> str:
    """The text up to its last whole event: a kill or a full disk may leave part of a line."""
    head, newline, last = text.rstrip(",").rpartition("\n")
    try:
        json.loads(last)
    except json.JSONDecodeError:
        if newline:
            return head.rstrip(",")
        return text
    return head + newline + last
