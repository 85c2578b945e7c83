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
from typing import BinaryIO, Protocol

from dataflow.signals import held_back

STATUS = struct.Struct("<i")
"""How a template says the exit code of a process that it has forked; negative: the signal."""


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
        with held_back():
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
    """A process that a template has forked, and whose exit code the template writes to a pipe.

    If the template dies, the kernel kills this process.
    """

    def __init__(self, pid: int, handle: int, status: int) -> None:
        """handle: its pidfd. status: the pipe's read end."""
        self.pid = pid
        self.ends = status
        self._handle = handle
        self._lock = threading.Lock()
        self._over = False

    def send_signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._over:
                signal.pidfd_send_signal(self._handle, number)

    def wait(self) -> int:
        told = os.read(self.ends, STATUS.size)
        if not told:  # its template is gone
            self.send_signal(signal.SIGKILL)
            select.select([self._handle], [], [])
        with self._lock:
            self._over = True
            os.close(self._handle)
        os.close(self.ends)
        return STATUS.unpack(told)[0] if told else -signal.SIGKILL
