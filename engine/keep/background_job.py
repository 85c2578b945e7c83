"""Files that are written while the run goes on, one at a time.

    thread             waits for            unblocked by
    the job's own      its next work        `begin`
    whoever begins it  the work before      that work's end

Owns: the thread, and that its error is raised by the next call. Does not own: what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class BackgroundJob:
    """Does one work after another in a thread of its own. name: of the thread."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._pending: Future[Any] | None = None

    def begin(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Begin this work, once the one before has ended. Raises what that one raised."""
        self.settle()
        self._pending = self._thread.submit(work, *arguments)

    def is_idle(self) -> bool:
        """Whether no work is under way."""
        return self._pending is None or self._pending.done()

    def settle(self) -> None:
        """Wait for the work under way, and raise what it raised; once. From any thread."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def end(self) -> None:
        """End the thread, after the work under way."""
        self._thread.shutdown()
