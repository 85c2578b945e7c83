"""What a Worker's process tells the Supervisor about its work: numbered events, metrics, spans,
and what users' functions print.

Owns: the numbers, and sending in their order. Does not own: the events (engine/run/worker), when
they are sent (worker_process.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from engine.protocol.messages import Event, From, Spilled
from engine.protocol.reports import Report, SpanOf
from engine.run.control.control import WorkerUpdate
from engine.run.control.control_socket import ControlSocket
from engine.run.control.wire import encode_message


class Updates:
    """Collects what the next `flush` sends. Thread-safe."""

    def __init__(self, link: ControlSocket, worker: str, epoch: int) -> None:
        self._link = link
        self._worker = worker
        self._epoch = epoch
        self._lock = threading.RLock()
        self._number = 0
        self._spills = False
        self._ended = 0
        self._ended_sent = 0
        self._events: list[From] = []
        self._reports: list[Report] = []
        self._spans: list[SpanOf] = []
        self._printed: list[str] = []

    def event(self, event: Event) -> None:
        """Number and add an event."""
        with self._lock:
            number = self._number
            self._number += 1
            numbered = From(worker=self._worker, epoch=self._epoch, number=number, event=event)
            self._events.append(numbered)

    def note_spill(self, nbytes: Callable[[], int]) -> bool:
        """Add an event if spilling has begun or ended. Returns whether it has."""
        with self._lock:
            now = nbytes()  # under the lock, so that the last event is true
            changed = bool(now) != self._spills
            if changed:
                self._spills = bool(now)
                self.event(Spilled(worker=self._worker, nbytes=now))
            return changed

    def report(self, reports: Iterable[Report]) -> None:
        """Add metrics."""
        with self._lock:
            self._reports += reports

    def span(self, span: SpanOf) -> None:
        """Add a span: something that was done."""
        with self._lock:
            self._spans.append(span)

    def add_printed_line(self, line: str) -> None:
        """Add a line that a user's function printed."""
        with self._lock:
            self._printed.append(line)

    def count_ended(self, count: int = 1) -> None:
        """Count instructions that have ended."""
        with self._lock:
            self._ended += count

    @property
    def has_events(self) -> bool:
        """Whether events wait for the next flush."""
        with self._lock:
            return bool(self._events)

    def flush_ended(self) -> None:
        """Flush if instructions have ended since the last flush."""
        with self._lock:
            if self._ended != self._ended_sent:
                self.flush()

    def flush(self) -> None:
        """Send everything in one frame."""
        with self._lock:
            update = WorkerUpdate(
                events=tuple(self._events),
                reports=tuple(self._reports),
                spans=tuple(self._spans),
                printed=tuple(self._printed),
                ended=self._ended,
            )
            self._events, self._reports, self._spans, self._printed = [], [], [], []
            self._ended_sent = self._ended
            self._link.send(encode_message(update))
