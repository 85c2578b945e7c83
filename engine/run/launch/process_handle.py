"""The process of a Worker, however it was started, or of a template, as the Supervisor sees it.

Owns: its signals, its end and its exit code. Does not own: whether it is forked (starter.py), what
is said to it (child.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from dataflow.signals import hold_back_signals

STATUS = struct.Struct("<i")
"""How a template says the exit code of a process that it has forked; negative: the signal."""
_TOLD = 1.0
"""Seconds for a template to say it once the process is no longer listed; it has it by then."""


class StartedProcess(Protocol):
    """ends: a descriptor that can be read once the process has ended."""

    pid: int
    ends: int

    def send_signal(self, number: int) -> None:
        """Does nothing once the process has ended."""
        ...

    def wait(self) -> int:
        """Once: wait for its end, close `ends`, return its exit code, negative for a signal."""
        ...


class FreshProcess:
    """An interpreter of its own, a child of this process."""

    def __init__(
        self,
        command: Sequence[str],
        descriptor: int,
        output: BinaryIO,
        environment: Mapping[str, str],
    ) -> None:
        """descriptor: the only one that it inherits, beside its output. No stop signal reaches it
        before it says so.
        """
        with hold_back_signals():
            self._process = subprocess.Popen(
                command,
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self.pid = self._process.pid
        self.ends = os.pidfd_open(self.pid)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        code = self._process.wait()
        os.close(self.ends)
        return code


class ForkedProcess:
    """A process that a template has forked.

    Its end is seen without the template, which may be stopped. If the template dies, the kernel
    kills this process.
    """

    def __init__(self, pid: int, handle: int, status: int) -> None:
        """handle: its pidfd. status: of the pipe to which the template writes the exit code."""
        self.pid = pid
        self.ends = handle
        self._status = status
        self._lock = threading.Lock()
        self._over = False

    def send_signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._over:
                signal.pidfd_send_signal(self.ends, number)

    def wait(self) -> int:
        _readable(self.ends)
        code = self._exit_code()
        # Under the lock, as another thread may be about to signal by this descriptor.
        with self._lock:
            self._over = True
            os.close(self.ends)
        os.close(self._status)
        return code

    def _exit_code(self) -> int:
        """Of the process that has ended: as the kernel says until the template takes note of it,
        then as the template says.
        """
        code = _zombie_exit_code(self.pid)
        if code is not None:
            return code
        # The template has reaped it: it has written the code, or has died before and nobody knows.
        status = b""
        if _readable(self._status, _TOLD):
            status = os.read(self._status, STATUS.size)
        if not status:
            return -signal.SIGKILL
        return STATUS.unpack(status)[0]


def _readable(descriptor: int, seconds: float | None = None) -> bool:
    """Wait until it can be read, or for so long. A descriptor may have any number."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(None if seconds is None else seconds * 1000))


def _zombie_exit_code(pid: int) -> int | None:
    """The exit code of a process that has ended and is still listed; None if it is not listed."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it is gone, or goes as its line is read
        return None
    fields = line.rpartition(")")[2].split()  # the name in brackets may have spaces
    state, status = fields[0], int(fields[-1])
    if state != "Z":
        return None
    return os.waitstatus_to_exitcode(status)
