"""What a simulated Worker has still to do, in which order.

Owns: which task is next. Does not own: what a task is (simulated_worker.py).

While rows are decoded that others may join, chunks and requests go on, and all else waits for the
last row; no chunk passes new weights that wait for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Done = Callable[[], None]
Task = Callable[[Done], None]
"""Begins something, and calls its argument once that has ended."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A task in the queue. chunk: requests overtake it; asked: it is a request; together: several
    ranks do it, and nothing overtakes it that ranks do together as well.
    """

    task: Task
    chunk: bool = False
    asked: bool = False
    together: bool = False


class TaskQueue:
    """Of one Worker."""

    def __init__(self) -> None:
        self._first: deque[Task] = deque()
        self._queue: deque[Waiting] = deque()

    @property
    def has_work(self) -> bool:
        """Whether anything but requests waits."""
        return bool(self._first) or not all(waiting.asked for waiting in self._queue)

    def add(self, waiting: Waiting) -> None:
        """It comes after all others."""
        self._queue.append(waiting)

    def add_first(self, task: Task) -> None:
        """It comes before all that did not."""
        self._first.append(task)

    def add_go(self, task: Task) -> None:
        """It comes first, but after all that ranks do together: their chunks, and what waits behind
        these.
        """
        for place in reversed(range(len(self._queue))):
            if self._queue[place].together:
                self._queue.insert(place + 1, Waiting(task, together=True))
                return
        self.add_first(task)

    def add_request(self, task: Task) -> None:
        """It comes before the chunks at the end of the queue, after all else."""
        place = len(self._queue)
        while place and self._queue[place - 1].chunk and not self._queue[place - 1].together:
            place -= 1
        self._queue.insert(place, Waiting(task, asked=True))

    def take(self, *, decoding: bool) -> Task | None:
        """Take the next task, if any. decoding: only what need not wait until no row is left."""
        if not decoding and self._first:
            return self._first.popleft()
        for place, waiting in enumerate(self._queue):
            if waiting.together and decoding and place:
                return None
            may_begin = waiting.asked or (waiting.chunk and not self._first)
            if may_begin or not decoding:
                del self._queue[place]
                return waiting.task
        return None


def end_both(finish: Task, ended: Done, done: Done) -> None:
    """Finish a load, whose span has ended then, too."""

    def end() -> None:
        ended()
        done()

    finish(end)
