"""What Workers failed with, and which of it ends the run.

Owns: the judgement. Does not own: how a Worker tells (engine/launch/worker_process.py), nor what ends
(local.py).

    failure of          becomes the run's                         is none
    a lone Worker       at once                                   where it was to end anyway
    a rank              GRACE seconds later                       the same, or where another rank of its group has ended

A rank that loses another one in a collective fails, too, and may well be heard before the end of
that one is noticed: what the run answers is that end, to which the group goes back. It is killed,
since it does nothing any more: whoever waits for something of it is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from engine.launch.ranks import Group

GRACE = 2.0
"""Seconds within which the end of a process is noticed."""


class Ending(Protocol):
    """As much of a Child as says whether it is there."""

    name: str
    replaced: bool

    @property
    def gone(self) -> bool: ...

    def kill(self) -> None: ...


class Failures:
    """Those that are not judged yet. groups: the rank group of each Worker that is in one. Its user
    locks.
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = groups
        self._waiting: list[tuple[float, Ending, BaseException]] = []

    def told(self, child: Ending, error: BaseException, now: float) -> None:
        """A Worker says that it failed. now: of the monotonic clock."""
        self._waiting.append((now, child, error))

    def judged(self, children: Mapping[str, Ending], now: float) -> BaseException | None:
        """The first failure that is the run's; those that are none are dropped, and their ranks
        killed. children: as they are now, by name.
        """
        left: list[tuple[float, Ending, BaseException]] = []
        for since, child, error in self._waiting:
            group = self._groups.get(child.name, ())
            # Some may not have been started yet.
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
