"""What kernels of a Worker wait for outside of the run, and how many rows they have in flight.

Owns: the seconds of these waits, by node and by what is waited for, as reports whose names begin
with `flow/`; the wait as a metric, as a span and in what the Worker does. Does not own: what they
are folded into (engine/keep/flow), waits for rows, weights and turns (activity.py there).

    thread         does                                   unblocked by
    the kernel's   waits                                  what it waits for
    any other      reads the seconds so far               -

A wait under way counts up to the moment at which somebody asks, so that a long one is seen while it
lasts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dataflow.errors import KernelError
from engine.protocol.reports import FLOW, Report
from engine.run.worker.timing import Timing


class OutsideWaits:
    """Of one Worker. Any thread may ask for the reports."""

    def __init__(self, timing: Timing, clock: Callable[[], float] = time.monotonic) -> None:
        self._timing, self._clock = timing, clock
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        """Since the last reports, by `node@worker/reason`."""
        self._under_way = ""
        self._counted_until = 0.0
        self._flights: dict[str, int] = {}
        """Rows in flight that are not reported yet, by node."""

    def of_node(self, node: str, *, counted: bool = True) -> NodeWaits:
        """The waits of a node. counted: they are part of its metrics."""
        return NodeWaits(waits=self, node=node, counted=counted)

    @contextmanager
    def waiting(self, node: str, reason: str, *, counted: bool) -> Iterator[None]:
        """A context in which the node only waits. Raises KernelError within another one, and for a
        reason that is no name.
        """
        if self._under_way or not reason.isidentifier():
            problem = f"expected a name and no other wait, found {reason!r} and {self._under_way!r}"
            fix = "Fix: waiting(...) with one word, not within another waiting(...)."
            raise KernelError(f"{node}: waiting: {problem}. {fix}")
        start = self._clock()
        with self._lock:
            self._under_way = f"{node}@{self._timing.worker}/{reason}"
            self._counted_until = start
        computing = self._timing.begin_wait(reason, start)
        try:
            yield
        finally:
            end = self._clock()
            with self._lock:
                self._count(end)
                self._under_way = ""
            self._timing.end_wait(computing, node, start, end, counted=counted)

    def flight(self, node: str, count: int) -> None:
        """So many rows of the node are in flight now."""
        with self._lock:
            self._flights[node] = count

    def reports(self) -> list[Report]:
        """Seconds since the last call, those of a wait under way too, and changed counts of rows in
        flight.
        """
        with self._lock:
            if self._under_way:
                self._count(self._clock())
            waited, self._seconds = self._seconds, {}
            flights, self._flights = self._flights, {}
        reports: list[Report] = []
        for whose, seconds in waited.items():
            reports.append((f"{FLOW}outside/{whose}", seconds, 1.0))
        for node, count in flights.items():
            name = f"{FLOW}in_flight/{node}@{self._timing.worker}"
            reports.append((name, float(count), 1.0))
        return reports

    def _count(self, now: float) -> None:
        """Count the wait under way up to now. The caller holds the lock."""
        seconds = max(0.0, now - self._counted_until)
        self._seconds[self._under_way] = self._seconds.get(self._under_way, 0.0) + seconds
        self._counted_until = now


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWaits:
    """The waits of one node, as its session notes them."""

    waits: OutsideWaits
    node: str
    counted: bool

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """See `OutsideWaits.waiting`."""
        with self.waits.waiting(self.node, reason, counted=self.counted):
            yield

    def flight(self, count: int) -> None:
        """See `OutsideWaits.flight`."""
        self.waits.flight(self.node, count)
