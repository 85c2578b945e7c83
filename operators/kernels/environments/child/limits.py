"""Limits of the operating system on an episode's process.

Owns: setting them. Does not own: their values (operators/environments.py), what a process that hits
one is told as. They are no sandbox: an environment may raise its own soft limits again.
"""

from __future__ import annotations

import resource
from typing import Any


class ProcessLimits:
    """memory_mb: address space. cpu_seconds: of each episode. open_files. None: no limit."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self._memory_mb: int | None = limits["memory_mb"]
        self._cpu_seconds: int | None = limits["cpu_seconds"]
        self._open_files: int | None = limits["open_files"]

    def set_once(self) -> None:
        """Set those that hold for a process from its first episode to its last."""
        if self._memory_mb is not None:
            _lower(resource.RLIMIT_AS, self._memory_mb << 20)
        if self._open_files is not None:
            _lower(resource.RLIMIT_NOFILE, self._open_files)

    def begin_episode(self) -> None:
        """Give the process its processor seconds anew: the soft limit, whose signal ends it."""
        if self._cpu_seconds is None:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + self._cpu_seconds
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (_capped(seconds, hard), hard))


def _lower(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    limit = _capped(most, hard)
    resource.setrlimit(kind, (limit, limit))


def _capped(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)
