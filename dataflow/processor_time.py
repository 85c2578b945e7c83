"""How long a thread or a process has computed, and has waited for a core to compute on.

Owns: reading both. Does not own: whose seconds they are part of (engine/worker/timing.py).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TASKS = Path("/proc/self/task")
_THREAD = Path("/proc/thread-self/schedstat")
_SECOND = 1e9
"""Nanoseconds, of which schedstat has three numbers: computed, queued, turns (proc(5))."""


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Seconds. queued: in which there was something to compute, and no core to do it on; 0 where
    the operating system does not say.
    """

    computed: float = 0.0
    queued: float = 0.0

    def __add__(self, other: ProcessorTime) -> ProcessorTime:
        return ProcessorTime(self.computed + other.computed, self.queued + other.queued)

    def since(self, before: ProcessorTime) -> ProcessorTime:
        """What came after `before`; threads that have ended meanwhile may have had more."""
        computed, queued = self.computed - before.computed, self.queued - before.queued
        return ProcessorTime(max(0.0, computed), max(0.0, queued))


def of_thread() -> ProcessorTime:
    """Of this thread."""
    return ProcessorTime(time.thread_time(), _queued([_THREAD]))


def of_process() -> ProcessorTime:
    """Of this process's threads, and what the processes that it started and that have ended
    computed.
    """
    times = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    computed = sum(used.ru_utime + used.ru_stime for used in times)
    return ProcessorTime(computed, _queued(_TASKS.glob("*/schedstat")))


def _queued(files: Iterable[Path]) -> float:
    total = 0
    for file in files:
        try:
            total += int(file.read_text(encoding="ascii").split()[1])
        except OSError:  # a thread that has ended; a system without schedstat
            continue
    return total / _SECOND
