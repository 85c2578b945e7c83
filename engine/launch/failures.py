"""Which failure of a Worker ends the run.

Owns: this judgement. Does not own: how a failure is sent (control.py), ending the run
(worker_io.py).

    failure of      ends the run          is ignored
    a lone Worker   at once               if it is being replaced
    a rank          GRACE seconds later   the same, or if another rank of its group has ended

A rank that loses another one in a collective fails too, perhaps before that one's end is noticed.
The run then restarts the whole group, so the failed rank is killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.launch.ranks import Group

if TYPE_CHECKING:
    from engine.launch.child import ChildProcess

GRACE = 2.0
"""Seconds within which the end of a process is noticed."""


class Failures:
    """Failures not judged yet. groups: of the Workers that are ranks. The caller holds the lock."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = groups
        self._waiting: list[tuple[float, ChildProcess, BaseException]] = []

    def add(self, child: ChildProcess, error: BaseException, now: float) -> None:
        """Note that a Worker failed. now: by the monotonic clock."""
        self._waiting.append((now, child, error))

    def judged(self, children: Mapping[str, ChildProcess], now: float) -> BaseException | None:
        """The first failure that ends the run; ignored ones are dropped, and their ranks killed."""
        left: list[tuple[float, ChildProcess, BaseException]] = []
        for since, child, error in self._waiting:
            group = self._groups.get(child.name, ())
            # Some ranks may not have been started yet.
            mates = [children[name] for name in group if name != child.name and name in children]
            if child.replaced:
                continue
            if any(mate.gone for mate in mates):
                child.kill()
                continue
            if not group or now - since >= GRACE:
                return error
            left.append((since, child, error))
        self._waiting = left
        return None
