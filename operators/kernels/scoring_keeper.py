"""The process between the kernel and a user's function: it ends everything that the function
started.

    waits for                           unblocked by
    the function's end                  the operating system (SIGCHLD)
    the end of the kernel's socket      the kernel's process, or the death signal if it forked

Owns: starting the function's process, and ending everything below it. Descendants that moved to
sessions of their own are reparented to the keeper, their subreaper (Linux; elsewhere only the
function's own process group is ended). Does not own: calling the function (scoring_child.py), time
limits (scoring_process.py).

    socket to the kernel's process   out: `pid <function's>`, then `ended <exit code>`; or `failed
                                     <errno>` where no process could be started; in: its end

Imports only the standard library and starts no thread, so that a fork is safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

_SUBREAPER, _DEATH_SIGNAL = 36, 1
_ORPHANED = signal.SIGCONT
"""Sent when the kernel's process ends: it also wakes a keeper that somebody has stopped. Signals
that stop a whole run are ignored here.
"""
_HEARD = (signal.SIGCHLD, _ORPHANED, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SECONDS = 5.0
"""Time for killed processes to end; some cannot (another user's, or waiting for a disk)."""
_ROUND = 0.05
_IN_BETWEEN = (0, 0, 0)
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of /proc/PID/stat: a thread of the kernel, which never has an environment."""


def main(answers: int, life: int, parent: int) -> None:
    """Start the function's process on the socket `answers`; stay until it or the parent ends.

    answers, life: descriptors of the two sockets to the parent's process.
    """
    to_parent = socket.socket(fileno=life)
    for descriptor in (answers, life):
        os.set_inheritable(descriptor, False)
    for number in _HEARD:
        signal.signal(number, _noted)
    # The kernel's process may have blocked signals when it started this one.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _prctl(_SUBREAPER, 1)
    keeper = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        to_parent.send(b"failed %d\n" % (error.errno or 0))
        os._exit(0)
    if pid == 0:
        to_parent.close()
        for number in (signal.SIGCHLD, _ORPHANED):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        die_with(keeper)
        from operators.kernels.scoring_child import main as serve

        serve(answers)
        return
    os.close(answers)
    with contextlib.suppress(OSError):
        to_parent.send(b"pid %d\n" % pid)
    Keeper(pid, to_parent, parent).keep()
    os._exit(0)


def die_with(parent: int) -> None:
    """On Linux: SIGKILL for this process when its parent ends, even in an endless call."""
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Keeper:
    """Waits for the function's process or the kernel's to end, then kills whatever is left."""

    def __init__(self, pid: int, to_parent: socket.socket, parent: int) -> None:
        self._pid = pid
        self._parent = to_parent
        self._code: int | None = None
        self._woken, wake = os.pipe()
        for descriptor in (self._woken, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._starter = parent
        _prctl(_DEATH_SIGNAL, _ORPHANED)

    def keep(self) -> None:
        """Run until nothing is left."""
        poll = select.poll()
        poll.register(self._parent, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        over = self._is_orphan()
        while self._reap() and self._code is None and not over:
            for descriptor, _ in poll.poll():
                over = over or descriptor == self._parent.fileno() or self._asked_to_end()
        if over and self._code is None:
            self._code = -signal.SIGTERM
        self._end_all()
        with contextlib.suppress(OSError):
            self._parent.send(b"ended %d\n" % (self._code if self._code is not None else 0))

    def _asked_to_end(self) -> bool:
        """Others than the system may send that signal, too."""
        with contextlib.suppress(BlockingIOError):
            return _ORPHANED in os.read(self._woken, 4096) and self._is_orphan()
        return False

    def _is_orphan(self) -> bool:
        return os.getppid() != self._starter

    def _reap(self) -> bool:
        """Collect every child that has ended; returns whether others are left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid and self._code is None:
                self._code = os.waitstatus_to_exitcode(status)

    def _end_all(self) -> None:
        """Kill until no child is left; the next round finds what was started in between."""
        deadline = time.monotonic() + _SECONDS
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        while self._reap() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)
            for pid in descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if poll.poll(_ROUND * 1e3):
                self._asked_to_end()


def descendants(of: int) -> list[int]:
    """Processes below this one, at any depth; none if there is no /proc."""
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_bytes().rpartition(b")")[2].split()[1])
            below.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    todo = [of]
    while todo:
        children = below.get(todo.pop(), [])
        found += children
        todo += children
    return found


def sweep(mark: str) -> None:
    """Kill every process with this mark in its environment, for when a keeper was killed.

    Looks again until one look shows the environment of every process: one in the middle of an exec
    has none for a moment, and one that ends may just have forked.
    """
    wanted = mark.encode()
    for _ in range(int(_SECONDS / _ROUND)):
        shown = {pid: _environment(pid) for pid in _processes()}
        found = [pid for pid, names in shown.items() if names is not None and wanted in names]
        hidden = [pid for pid, names in shown.items() if names is None]
        if not found and not hidden:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in (*found, *hidden):
            _wait(pid)


def _wait(pid: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        handle = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll(_ROUND * 1e3)
        finally:
            os.close(handle)


def _processes() -> list[int]:
    return [int(found.name) for found in Path("/proc").glob("[0-9]*")]


def _environment(pid: int) -> list[bytes] | None:
    """The variables of a process; None where it has none yet, or no longer: it executes another
    program, or ends, just now. Another user's, which cannot be read, count as none.
    """
    process, names = Path(f"/proc/{pid}"), b""
    try:
        before = _image(process)
        with contextlib.suppress(ProcessLookupError):  # it has no memory
            names = (process / "environ").read_bytes()
        settled = names or before == _image(process) != _IN_BETWEEN
    except PermissionError:
        return []
    except OSError:
        return None
    return names.split(b"\0") if settled else None


def _image(process: Path) -> tuple[int, ...]:
    """Where the program of a process begins, its stack and its environment: an exec moves them, and
    sets the first of them last. Zeros while it has none; one number where it never will.
    """
    fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
    state, flags, code = fields[0], int(fields[6]), int(fields[23])
    if state in b"ZX" or flags & _KERNEL_THREAD:
        return (0,)
    return (code, int(fields[25]), int(fields[47])) if code else _IN_BETWEEN


def _noted(number: int, frame: object) -> None:
    """Do nothing: signals are read from the wake-up descriptor."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, int(value), 0, 0, 0)
