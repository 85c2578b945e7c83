"""What a Worker is doing and how long that takes.

Owns: the one thing under way, its span and its time as a metric; an error that leaves a kernel
names its node, an exit of the user's code (sys.exit) among them. Does not own: where spans and
metrics go (loop.py).
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
    """`doing` may be read from any thread. span: told of everything that was done. origin: the line
    of a node.
    """

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
        """A context that is this node's. counted: its time is part of time/<node>; a rank's beside
        the first is not.
        """
        return During(self, node, what, counted)

    def reports(self) -> list[Report]:
        """Times since the last call."""
        found, self._reports = self._reports, []
        return found

    def note(self, node: str, what: str, start: float, end: float, *, counted: bool) -> None:
        """Something took this long."""
        if counted:
            self._reports.append((f"time/{node}", end - start, 1.0))
        if self.span is not None:
            self.span(node, what, start, end)


class During:
    """What a Worker is doing, and how long it takes; whatever a kernel raises comes out naming its
    node.
    """

    def __init__(self, timing: Timing, node: str, what: str, counted: bool) -> None:
        self._timing, self._node, self._what, self._counted = timing, node, what, counted
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()
        worker = self._timing.worker
        self._timing.doing = Doing(
            worker=worker, node=self._node, what=self._what, since=self._start
        )
        show(f"{worker} is in {self._placed()} ({self._what})")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._timing.doing = self._timing.idle
        show(f"{self._timing.worker} is between two kernels")
        self._timing.note(
            self._node, self._what, self._start, time.monotonic(), counted=self._counted
        )
        if isinstance(error, DataError) and self._what != "open" and self._node not in str(error):
            raise KernelError(f"{self._placed()}: {self._what}: {error}") from error
        if isinstance(error, DataflowError):
            self._place(error)
        elif isinstance(error, Exception) and self._what == "restore":
            said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise CheckpointError(
                f"{self._placed()}: expected files that it wrote in the checkpoint, found others"
                f" ({said}). Fix: an earlier checkpoint."
            ) from error
        elif error is not None and not isinstance(
            error, (KeyboardInterrupt, GeneratorExit)
        ):  # sys.exit() is one
            told = "".join(traceback.format_exception(error)).rstrip()
            why = f"raised {type(error).__name__}: {error}. Fix: see the traceback.\n{told}"
            raise KernelError(f"{self._placed()}: {self._what}: {why}") from error

    def _placed(self) -> str:
        """`grpo.py:14 score`, as the check names it."""
        origin = self._timing.origin(self._node)
        return f"{origin} {self._node}" if origin else self._node

    def _place(self, error: DataflowError) -> None:
        """Put the node's line before what the error says; the error stays what it is, as others may
        know it.
        """
        origin, said = self._timing.origin(self._node), str(error)
        if origin is None or f"{origin} " in said:
            return
        named = said.startswith((f"{self._node}:", f"{self._node} ", f"node {self._node!r}"))
        error.args = (f"{origin} {said}" if named else f"{self._placed()}: {said}",)
