"""What the engine's own time in a Step of one process is spent on.

Owns: which calls belong to which part, and the seconds of each part. Does not own: the run that is
measured (overhead.py).

    part          what it is                                            measured around
    kernels       the nodes' own time                                   During
    bookkeeping   the coordinator's decisions                           Coordinator
    messages      rows and instructions: what a Worker does around      InprocWorkers
                  its kernels (gather, check, keep, report)
    events        what subscribers make of the run's events             EventStream's takers
    files         lines and segments that this thread writes            the writers
    loop          what is left of a Step

A part's seconds leave out those of the parts that are called inside. Each call that is measured
takes about a microsecond more.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from engine.coordinator.coordinator import Coordinator
from engine.keep.flow.writer import FlowWriter
from engine.keep.metrics.sinks import JsonLines
from engine.keep.samples import SampleWriter
from engine.keep.trace.timeline import Trace
from engine.protocol.events import EventStream, Take
from engine.run.worker.in_process_worker import InprocWorkers
from engine.run.worker.timing import During

PARTS = ("kernels", "bookkeeping", "messages", "events", "files", "loop")
_CALLS: tuple[tuple[str, type, tuple[str, ...]], ...] = (
    ("bookkeeping", Coordinator, ("handle_together",)),
    ("messages", InprocWorkers, ("next", "ask", "reports", "spans", "doing")),
    ("files", JsonLines, ("write", "amend", "sync")),
    ("files", FlowWriter, ("step", "second")),
    ("files", Trace, ("flush",)),
    ("files", SampleWriter, ("write",)),
)


class Stopwatch:
    """Seconds by part, of one thread, each without the parts inside it. open: of parts entered."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._clock = clock
        self._open = ["loop"]
        self._since = clock()
        self._thread = threading.get_ident()

    def enter(self, part: str) -> None:
        """From now on this part runs, until it leaves."""
        self._pass()
        self._open.append(part)

    def leave(self) -> None:
        """From now on the part around it runs again."""
        self._pass()
        self._open.pop()

    def lap(self) -> dict[str, float]:
        """Seconds by part since the last lap."""
        self._pass()
        seconds = self.seconds
        self.seconds = dict.fromkeys(PARTS, 0.0)
        return seconds

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, which belongs to a part."""

        @functools.wraps(call)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*args, **kwargs)
            self.enter(part)
            try:
                return call(*args, **kwargs)
            finally:
                self.leave()

        return measured

    def _pass(self) -> None:
        now = self._clock()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


@contextmanager
def measured_parts() -> Iterator[Stopwatch]:
    """A stopwatch of the runs that begin in this context, in this thread."""
    watch = Stopwatch()
    add, enter, leave = EventStream.on, During.__enter__, During.__exit__

    def on(stream: EventStream, take: Take, *kinds: type) -> None:
        add(stream, watch.around("events", take), *kinds)

    def begin(during: During) -> None:
        enter(during)
        watch.enter("kernels")

    def end(during: During, *error: Any) -> None:
        watch.leave()
        leave(during, *error)

    patches = [patch.object(EventStream, "on", on)]
    patches += [patch.object(During, "__enter__", begin), patch.object(During, "__exit__", end)]
    patches += [
        patch.object(owner, name, watch.around(part, getattr(owner, name)))
        for part, owner, names in _CALLS
        for name in names
    ]
    for each in patches:
        each.start()
    try:
        yield watch
    finally:
        for each in patches:
            each.stop()
