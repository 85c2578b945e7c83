"""Records of seconds while the run's own thread computes.

    thread             waits for         unblocked by
    the flow's thread  its next look     the clock, the end of the attempt

The loop tells about each second what goes on, but not while it carries out a kernel itself, as in a
run of one process, or waits for files. Then this thread does. Owns: the thread. Does not own: what
is told (fold.py). Code that holds the interpreter's lock stops this thread, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from engine.keep.flow.fold import FlowFold
from engine.protocol.reports import Doing, Report

_EVERY = 1.0
"""Seconds between two looks."""


@contextmanager
def fold_meanwhile(
    fold: FlowFold,
    doing: Callable[[], Sequence[Doing]],
    reports: Callable[[], Sequence[Report]] = tuple,
) -> Iterator[None]:
    """Inside it, the seconds of a kernel are told while it computes; at its end all is folded.
    doing, reports: what each Worker does now, and figures of what flows; may be called from any
    thread.
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(_EVERY):
            fold.meanwhile(time.monotonic(), doing(), reports)

    thread = threading.Thread(target=look, name="flow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        fold.fold()
