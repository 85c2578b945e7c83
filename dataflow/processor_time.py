"""How long a thread or a process has computed, and has waited for a core to compute on.

Owns: reading both. Does not own: whose seconds they are part of (engine/run/worker/timing.py).
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

_TASKS = Path("/proc/self/task")
_THREAD = Path("/proc/thread-self/schedstat")
_SECOND = 1e9
"""Nanoseconds, of which schedstat has three numbers: computed, queued, turns (proc(5))."""


class ProcessorTime(msgspec.Struct, frozen=True):
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
    return ProcessorTime(time.thread_time(), _thread_file.read_queued())


def of_process() -> ProcessorTime:
    """Of this process's threads, and what the processes that it started and that have ended
    computed.
    """
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    computed = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return ProcessorTime(computed, _sum_queued(_TASKS.glob("*/schedstat")))


class _OpenFile:
    """A file of one thread, closed with it. process: that opened it."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.number = -1
        with suppress(OSError):  # a system without schedstat
            self.number = os.open(_THREAD, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        # After a fork the number may be that of another file: a process that begins closes all.
        if self.number >= 0 and self.process == os.getpid():
            os.close(self.number)


class _ThreadFile(threading.local):
    """This thread's file, which stays open: a node that has a row a call is asked for it twice."""

    def __init__(self) -> None:
        self.file = _OpenFile()

    def read_queued(self) -> float:
        """Read the seconds; 0 on a system without the file."""
        if self.file.process != os.getpid():  # a fork: it is the file of the thread that forked
            self.file = _OpenFile()
        if self.file.number < 0:
            return 0.0
        numbers = os.pread(self.file.number, 128, 0).split()
        return int(numbers[1]) / _SECOND


_thread_file = _ThreadFile()


def _sum_queued(files: Iterable[Path]) -> float:
    """Seconds, of all of these schedstat files."""
    total = 0
    for file in files:
        try:
            total += int(file.read_text(encoding="ascii").split()[1])
        except OSError:  # a thread that has ended; a system without schedstat
            continue
    return total / _SECOND
