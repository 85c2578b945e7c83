"""What the simulated loop asks of Workers about files: it waits for all answers, and hears nothing
else meanwhile.

Owns: whose answer is awaited, what has come meanwhile. Does not own: what is asked (workers.py),
nor how a Worker does it (incarnation.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.coordinator.refs import Gather

Done = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request to one Worker: to save what it has of these nodes, each together with the node's
    other ranks, and to read these rows.
    """

    number: int
    nodes: tuple[str, ...] = ()
    rows: tuple[Gather, ...] = ()


class Asking:
    """The request under way, if there is one."""

    def __init__(self) -> None:
        self._number = 0
        self._left: set[str] = set()
        self._then: Callable[[bool], None] | None = None
        self._meanwhile: deque[Done] = deque()
        self._lost: set[str] = set()
        """Who is known to be gone, and not begun anew."""

    def ask(
        self, workers: Sequence[str], send: Callable[[str, int], None], then: Callable[[bool], None]
    ) -> None:
        """Send all these a request with a number of its own; `then` is told whether all have
        answered. Of one that is gone nothing is awaited.
        """
        assert self._then is None
        self._left, self._then = set(workers), then
        self._number += 1
        for worker in workers:
            send(worker, self._number)
        if self._left & self._lost:
            self._end(well=False)

    def in_turn(self, action: Done) -> None:
        """Now, or once nothing is asked any more."""
        if self._then is None:
            action()
        else:
            self._meanwhile.append(action)

    def answered(self, number: int, worker: str, *, well: bool) -> None:
        """A Worker has done what it was asked, or could not, as rows are gone with theirs."""
        if number != self._number or worker not in self._left:  # nobody waits for it any more
            return
        self._left.discard(worker)
        if not well or not self._left:
            self._end(well=well)

    def lost(self, worker: str) -> None:
        """A Worker is known to be gone."""
        self._lost.add(worker)
        if worker in self._left:
            self._end(well=False)

    def respawned(self, worker: str) -> None:
        """It is begun anew: then it answers."""
        self._lost.discard(worker)

    def _end(self, *, well: bool) -> None:
        then, self._then = self._then, None
        assert then is not None
        self._left = set()
        then(well)
        while self._meanwhile and self._then is None:
            self._meanwhile.popleft()()
