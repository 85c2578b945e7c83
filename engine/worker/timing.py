"""What a Worker is doing and how long that takes.

Owns: the one thing under way, its span and its time as a metric; naming the node in every error
that leaves a kernel, even a sys.exit() of the user's code. Does not own: where spans and metrics go
(engine/run/loop.py).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

from dataflow.activity import show
from dataflow.errors import CheckpointError, DataError, DataflowError, KernelError, Origin
from engine.observe.reports import Doing, Report

Span = Callable[[str, str, float, float], None]
"""(track, name, start, end) of something that the Worker did, in seconds of the monotonic clock."""


class Timing:
    """`doing` may be read from any thread. span: called with each span. origin: a node's line."""

    def __init__(
        self, worker: str, origin: Callable[[str], Origin | None] = lambda node: None
    ) -> None:
        self.origin = origin
        self.idle = Doing(worker=worker)
        self.doing = self.idle
        self.span: Span | None = None
        self.worker = worker
        self._reports: list[Report] = []

    def during(self, node: str, what: str, *, counted: bool = True) -> During:
        """A context in which the node computes. counted: its time is part of time/<node>."""
        return During(self, node, what, counted)

    def reports(self) -> list[Report]:
        """Times since the last call."""
        found, self._reports = self._reports, []
        return found

    def note(self, node: str, what: str, start: float, end: float, *, counted: bool) -> None:
        """Report a span, and its time where that counts."""
        if counted:
            self._reports.append((f"time/{node}", end - start, 1.0))
        if self.span is not None:
            self.span(node, what, start, end)


class During:
    """A context that notes what a Worker does and how long; its errors name the node."""

    def __init__(self, timing: Timing, node: str, what: str, counted: bool) -> None:
        self._timing, self._node, self._what, self._counted = timing, node, what, counted
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()
        worker, what = self._timing.worker, self._what
        self._timing.doing = Doing(worker=worker, node=self._node, what=what, since=self._start)
        show(f"{worker} is in {self._placed()} ({what})")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._timing.doing = self._timing.idle
        show(f"{self._timing.worker} is between two kernels")
        what, end = self._what, time.monotonic()
        self._timing.note(self._node, what, self._start, end, counted=self._counted)
        if isinstance(error, DataError) and what != "open" and self._node not in str(error):
            raise KernelError(f"{self._placed()}: {what}: {error}") from error
        if isinstance(error, DataflowError):
            self._place(error)
        elif isinstance(error, Exception) and what == "restore":
            said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            problem = f"expected files that it wrote in the checkpoint, found others ({said})"
            told = f"{self._placed()}: {problem}. Fix: an earlier checkpoint."
            raise CheckpointError(told) from error
        elif error is not None and not isinstance(error, (KeyboardInterrupt, GeneratorExit)):
            told = "".join(traceback.format_exception(error)).rstrip()
            why = f"raised {type(error).__name__}: {error}. Fix: see the traceback.\n{told}"
            raise KernelError(f"{self._placed()}: {what}: {why}") from error

    def _placed(self) -> str:
        """`my_graph.py:14 score`, as the check names it."""
        origin = self._timing.origin(self._node)
        return f"{origin} {self._node}" if origin else self._node

    def _place(self, error: DataflowError) -> None:
        """Put the node's line before the error's text. The exception stays the same object."""
        origin, said = self._timing.origin(self._node), str(error)
        if origin is None or f"{origin} " in said:
            return
        named = said.startswith((f"{self._node}:", f"{self._node} ", f"node {self._node!r}"))
        error.args = (f"{origin} {said}" if named else f"{self._placed()}: {said}",)
