"""What a Worker's process tells the Supervisor of its work: events, metrics, spans, numbered.

Owns: the numbers, and that what is numbered first is sent first. Does not own: what is told
(engine/worker), when it is sent (worker_process.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from engine.coordinator.messages import Event, From, Spilled
from engine.launch.control import WorkerUpdate
from engine.launch.control_socket import ControlSocket
from engine.launch.wire import encode
from engine.observe.reports import Report, SpanOf


class Updates:
    """Everything but `flush` only collects, for the next flush; all of it from any thread."""

    def __init__(self, link: ControlSocket, worker: str, epoch: int) -> None:
        self._link = link
        self._worker = worker
        self._epoch = epoch
        self._lock = threading.Lock()
        self._number = 0
        self._spills = False
        self._ended = 0
        self._ended_sent = 0
        self._events: list[From] = []
        self._reports: list[Report] = []
        self._spans: list[SpanOf] = []

    def event(self, event: Event) -> None:
        """Number an event."""
        with self._lock:
            self._number_event(event)

    def _number_event(self, event: Event) -> None:
        self._events.append(
            From(worker=self._worker, epoch=self._epoch, number=self._number, event=event)
        )
        self._number += 1

    def spilled(self, nbytes: Callable[[], int]) -> bool:
        """An event when spilling begins and when it ends; whether either is the case. nbytes is
        called within the lock, so that the last event is true.
        """
        with self._lock:
            now = nbytes()
            changed = bool(now) != self._spills
            if changed:
                self._spills = bool(now)
                self._number_event(Spilled(worker=self._worker, nbytes=now))
            return changed

    def report(self, reports: Iterable[Report]) -> None:
        """Metrics."""
        with self._lock:
            self._reports += reports

    def span(self, node: str, what: str, start: float, end: float) -> None:
        """Something that was done."""
        with self._lock:
            self._spans.append((f"{self._worker}/{node}", what, start, end))

    def ended(self, count: int = 1) -> None:
        """So many more instructions have ended."""
        with self._lock:
            self._ended += count

    def flush_ended(self) -> None:
        """Send how many have ended, unless that was sent."""
        with self._lock:
            sent = self._ended == self._ended_sent
        if not sent:
            self.flush()

    def flush(self) -> None:
        """Send all of it in one frame."""
        with self._lock:
            update = WorkerUpdate(
                events=tuple(self._events),
                reports=tuple(self._reports),
                spans=tuple(self._spans),
                ended=self._ended,
            )
            self._events, self._reports, self._spans = [], [], []
            self._ended_sent = self._ended
            self._link.send(encode(update))
