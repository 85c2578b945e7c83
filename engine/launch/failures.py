"""Which failure of a Worker ends the run.

Owns: this judgement. Does not own: how a failure is sent (control.py), nor what ends the run
(worker_io.py).

    failure of      ends the run          is ignored
    a lone Worker   at once               if it was to end anyway
    a rank          GRACE seconds later   the same, or if another rank of its group has ended

A rank that loses another one in a collective fails too, perhaps before the end of that one is
noticed. The run then answers that end, by restarting the group, and this rank is killed, since it
does nothing any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from engine.launch.ranks import Group

GRACE = 2.0
"""Seconds within which the end of a process is noticed."""


class Ending(Protocol):
    """As much of a ChildProcess as says whether it is there."""

    name: str
    replaced: bool

    @property
    def gone(self) -> bool: ...

    def kill(self) -> None: ...


class Failures:
    """Those not judged yet. groups: the rank group of each Worker in one. The caller locks."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = groups
        self._waiting: list[tuple[float, Ending, BaseException]] = []

    def add(self, child: Ending, error: BaseException, now: float) -> None:
        """A Worker says that it failed. now: of the monotonic clock."""
        self._waiting.append((now, child, error))

    def judged(self, children: Mapping[str, Ending], now: float) -> BaseException | None:
        """The first failure that ends the run; ignored ones are dropped, and their ranks killed.
        children: as they are now, by name.
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
