"""The Workers of a run in which there is one, in the loop's own process.

Owns: the order of what it was told. Does not own: the Worker's kernels (worker.py), nor any
decision.

Instructions are carried out in the order in which they were given, one when the loop asks for the
next event, but for those that join a run (chunk_runs.py); the kernel goes on when the event before
has been heard. Nothing is under way while the loop decides.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from engine.protocol.messages import Event, Release, ToWorker, WorkerOpened
from engine.protocol.reports import Doing, Report, SpanOf
from engine.protocol.workers import Ask
from engine.run.worker.counters import PeakReports
from engine.run.worker.worker import Worker

_MEMORY_EVERY = 0.9
"""Seconds between two looks at the process's memory."""


class InprocWorkers:
    """One Worker, called. See `engine.protocol.workers.Workers`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._told: deque[ToWorker] = deque()
        self.tell = self._told.append
        """It comes after all that was told before."""
        self._under_way: Generator[Event, None, None] | None = None
        self._heard: deque[Event] = deque()
        self._spans: list[SpanOf] = []
        self._memory = PeakReports(worker.name)
        self._memory_due = 0.0
        worker.timing.span = lambda span: self._spans.append(span)
        worker.runs.take_next = self._take_within

    def open(self) -> Iterator[Event]:
        """Open its kernels. Raises what a kernel refuses its node with."""
        yield from self._worker.open()
        yield WorkerOpened(worker=self._worker.name, epoch=0)

    def next(self, timeout: float | None = None) -> Event | None:
        """The next event; None where nothing is left to do. Takes as long as the kernel does, but
        for a timeout of 0: then None where the next one is still to be made. Raises what a kernel
        raises.
        """
        if self._heard:
            return self._heard.popleft()
        return None if timeout == 0.0 else self._next_event()

    def _next_event(self) -> Event | None:
        """Go on with what is under way, then with what was told, until an event comes of it."""
        while self._under_way is not None or self._told:
            if self._under_way is None:
                self._under_way = self._worker.execute(self._told.popleft())
            event = next(self._under_way, None)
            if event is not None:
                return event
            self._under_way = None
        return None

    def _take_within(self, passes: Callable[[ToWorker], bool]) -> ToWorker | None:
        """What the run under way carries out next."""
        if self._told and passes(self._told[0]):
            return self._told.popleft()
        return None

    def next_while_idle(self, timeout: float) -> Event | None:
        """None: nothing comes but from the Worker itself."""
        del timeout
        return None

    @property
    def busy(self) -> bool:
        """Whether something is under way, told, or not heard."""
        return self._under_way is not None or bool(self._told or self._heard)

    def ask(self, requests: Mapping[str, Ask]) -> dict[str, Any]:
        """Answered after everything that was told before."""
        while (event := self._next_event()) is not None:
            self._heard.append(event)
        return {name: self._worker.files.answer(request) for name, request in requests.items()}

    def forget(self) -> None:
        """Of what was not begun only releases stay."""
        releases = [i for i in self._told if isinstance(i, Release)]
        self._told.clear()
        self._told.extend(releases)

    def respawn(self, workers: Sequence[str]) -> None:
        """Never: this process would be gone with it."""
        raise AssertionError(
            f"{', '.join(workers)}: the only Worker is the process that would start it anew"
        )

    def retire(self, workers: Sequence[str]) -> None:
        """Never: the plan of one Worker has no spare ones."""
        raise AssertionError(f"{', '.join(workers)}: the only Worker cannot leave")

    def reports(self) -> list[Report]:
        """Its metrics since the last call, and the memory of this process: about once a second,
        and where its peak has grown.
        """
        reports, now = self._worker.reports(), time.monotonic()
        if now >= self._memory_due or self._memory.has_grown():
            self._memory_due = now + _MEMORY_EVERY
            reports += self._memory.reports()
        return reports

    def spans(self) -> list[SpanOf]:
        """What it did since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def doing(self) -> list[Doing]:
        """From any thread."""
        return [self._worker.timing.doing]

    def live_reports(self) -> list[Report]:
        """What its kernels wait for, and their rows in flight; from any thread."""
        return self._worker.waits.reports()

    def stacks(self) -> list[str]:
        """Of this process the watchdog shows them."""
        return []

    def close(self) -> None:
        """End what is under way, and close its kernels."""
        under_way, self._under_way = self._under_way, None
        try:
            if under_way is not None:
                under_way.close()
        finally:
            self._worker.close()
            self._worker.channel.close()
