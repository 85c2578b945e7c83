"""Which failure of a Worker ends the run.

Owns: this judgement. Does not own: how a failure is sent (control.py), ending the run
(worker_io.py).

    failure of      ends the run          is ignored
    a lone Worker   at once               if it is being replaced
    a rank          GRACE seconds later   the same, or if another rank of its group has ended
    a rank whose    after the lease       the same; the end of a rank on another host is told here
      group is on                         before the lease is over, or its host is given up
      many hosts

A rank that loses another one in a collective fails too, perhaps before that one's end is noticed.
The run then restarts the whole group, so the failed rank is killed. What is wrong with data, plans
or files is never due to another rank, so on many hosts too it waits for GRACE only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from dataflow.errors import KernelError, RunError
from engine.run.launch.ranks import Group

if TYPE_CHECKING:
    from engine.run.launch.child import ChildProcess

_NONE: Mapping[str, float] = MappingProxyType({})
GRACE = 2.0
"""Seconds within which the end of a process is noticed."""


class Failures:
    """Failures not judged yet. groups: of the Workers that are ranks. far: the lease, by Worker
    whose group has ranks on other hosts. The caller holds the lock.
    """

    def __init__(self, groups: Mapping[str, Group], far: Mapping[str, float] = _NONE) -> None:
        self._groups = groups
        self._far = far
        self._gone: set[tuple[str, int]] = set()
        """Workers of other hosts that have ended, and their epochs."""
        self._waiting: list[tuple[float, ChildProcess, BaseException]] = []

    def add(self, child: ChildProcess, error: BaseException, now: float) -> None:
        """Note that a Worker failed. now: by the monotonic clock."""
        self._waiting.append((now, child, error))

    def note_gone(self, worker: str, epoch: int) -> None:
        """A Worker of another host has ended. The ranks of a group have one epoch."""
        self._gone.add((worker, epoch))

    def judge(self, children: Mapping[str, ChildProcess], now: float) -> BaseException | None:
        """The first failure that ends the run; ignored ones are dropped, and their ranks killed."""
        left: list[tuple[float, ChildProcess, BaseException]] = []
        for since, child, error in self._waiting:
            group = self._groups.get(child.name, ())
            # Some ranks may not have been started yet.
            mates = [children[name] for name in group if name != child.name and name in children]
            if child.replaced:
                continue
            far = any((name, child.epoch) in self._gone for name in group)
            if far or any(mate.gone for mate in mates):
                child.kill()
                continue
            if not group or now - since >= self._patience(child, error):
                return error
            left.append((since, child, error))
        self._waiting = left
        return None

    def _patience(self, child: ChildProcess, error: BaseException) -> float:
        """Seconds within which the end of another rank, if that is the cause, is noticed."""
        lost = type(error) in (KernelError, RunError)
        return max(GRACE, self._far.get(child.name, 0.0)) if lost else GRACE
