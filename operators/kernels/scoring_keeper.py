"""The process between the kernel and a user's function: it ends everything that the function
started.

    waits for                           unblocked by
    the function's end                  the operating system (SIGCHLD)
    the end of the kernel's socket      the kernel's process, or the death signal if it forked

Owns: starting the function's process, and ending everything below it. Descendants that moved to
sessions of their own are reparented to the keeper, their subreaper (Linux; elsewhere only the
function's own process group is ended). Does not own: calling the function (scoring_child.py), time
limits (scoring_process.py). Environments' templates have one, too (environments/).

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
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SIGNALS = (signal.SIGCHLD, _ORPHANED, *_STOPS)
"""Those that wake the keeper; by themselves they do nothing to it."""
_SECONDS = 5.0
"""Time for killed processes to end; some cannot (another user's, or waiting for a disk)."""
_ROUND = 0.05
_IN_EXEC = (0, 0, 0)
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of /proc/PID/stat: a thread of the kernel, which never has an environment."""


def main(answers: int, life: int, parent: int, *program: str) -> None:
    """Start the function's process on the socket `answers`; stay until it or the parent ends.

    answers, life: descriptors of the two sockets to the parent's process. program: the words of a
    command that takes the place of a reward's process; it inherits `answers` and gets stop signals
    only once it lets them through.
    """
    to_parent = socket.socket(fileno=life)
    for descriptor in (answers, life):
        os.set_inheritable(descriptor, False)
    for number in _SIGNALS:
        signal.signal(number, _do_nothing)
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
        _end_with(keeper)
        if program:
            os.set_inheritable(answers, True)
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
            os.execv(program[0], program)
        # Only after the fork: before it, this process imports the standard library alone.
        from operators.kernels.scoring_child import main as serve

        serve(answers)
        return
    os.close(answers)
    with contextlib.suppress(OSError):
        to_parent.send(b"pid %d\n" % pid)
    Keeper(pid, to_parent, parent).keep()
    os._exit(0)


def _end_with(parent: int) -> None:
    """On Linux: SIGKILL for this process when its parent ends, even in an endless call. Ends it at
    once, without a word, if `parent` is no longer its parent.

    engine/run/control/lifeline.py does the same for processes of a run: this file may import
    neither that nor dataflow, which imports Arrow.
    """
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Keeper:
    """Waits for the function's process or the kernel's to end, then kills whatever is left."""

    def __init__(self, pid: int, to_parent: socket.socket, parent: int) -> None:
        """pid: the function's process. parent: the kernel's, at the other end of `to_parent`."""
        self._pid = pid
        self._parent = to_parent
        self._code: int | None = None
        self._woken, wake = os.pipe()
        for descriptor in (self._woken, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._parent_pid = parent
        _prctl(_DEATH_SIGNAL, _ORPHANED)

    def keep(self) -> None:
        """Run until no process is left below this one."""
        poll = select.poll()
        poll.register(self._parent, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        # The parent may have ended before its end could send a signal.
        is_over = self._is_orphan()
        while self._reap() and self._code is None and not is_over:
            for descriptor, _ in poll.poll():
                is_over = is_over or descriptor == self._parent.fileno() or self._was_orphaned()
        if is_over and self._code is None:
            self._code = -signal.SIGTERM
        self._end_all()
        exit_code = 0 if self._code is None else self._code
        with contextlib.suppress(OSError):
            self._parent.send(b"ended %d\n" % exit_code)

    def _was_orphaned(self) -> bool:
        """Whether the signal has come, and the parent is gone: others than the system may send that
        signal, too.
        """
        with contextlib.suppress(BlockingIOError):
            return _ORPHANED in os.read(self._woken, 4096) and self._is_orphan()
        return False

    def _is_orphan(self) -> bool:
        return os.getppid() != self._parent_pid

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
            for pid in list_descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if poll.poll(_ROUND * 1e3):
                self._was_orphaned()  # empties the pipe: else the next round would not wait


def list_descendants(ancestor: int) -> list[int]:
    """List the processes below this one, at any depth; none if there is no /proc."""
    children_of: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Behind the name, which is in parentheses and may have any characters.
            fields = stat.read_bytes().rpartition(b")")[2].split()
            parent = int(fields[1])
            children_of.setdefault(parent, []).append(int(stat.parent.name))
    descendants: list[int] = []
    todo = [ancestor]
    while todo:
        children = children_of.get(todo.pop(), [])
        descendants += children
        todo += children
    return descendants


def sweep(mark: str) -> None:
    """Kill every process with this mark in its environment, for when a keeper was killed.

    Looks again until one look shows the environment of every process: one in the middle of an exec
    has none for a moment, and one that ends may just have forked.
    """
    marked_variable = mark.encode()
    for _ in range(int(_SECONDS / _ROUND)):
        marked: list[int] = []
        hidden: list[int] = []
        for pid in _list_processes():
            variables = _environment(pid)
            if variables is None:
                hidden.append(pid)
            elif marked_variable in variables:
                marked.append(pid)
        if not marked and not hidden:
            return
        for pid in marked:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in (*marked, *hidden):
            _await_end(pid)


def _await_end(pid: int) -> None:
    """Wait for a round, or until the process ends; not at all where the system cannot tell."""
    with contextlib.suppress(OSError, AttributeError):
        handle = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll(_ROUND * 1e3)
        finally:
            os.close(handle)


def _list_processes() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def _environment(pid: int) -> list[bytes] | None:
    """The variables of a process; None where it has none yet, or no longer: it executes another
    program, or ends, just now. Another user's, which cannot be read, count as none.
    """
    process = Path(f"/proc/{pid}")
    variables = b""
    try:
        before = _read_image(process)
        with contextlib.suppress(ProcessLookupError):  # it has no memory
            variables = (process / "environ").read_bytes()
        # No variables count only if it was the same program before and after they were read.
        is_settled = variables or before == _read_image(process) != _IN_EXEC
    except PermissionError:
        return []
    except OSError:
        return None
    return variables.split(b"\0") if is_settled else None


def _read_image(process: Path) -> tuple[int, ...]:
    """Where the program of a process begins, its stack and its environment: an exec moves them, and
    sets the first of them last. Zeros while it has none; one number where it never will.
    """
    fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
    state = fields[0]
    flags = int(fields[6])
    code = int(fields[23])
    if state in b"ZX" or flags & _KERNEL_THREAD:
        return (0,)
    if not code:
        return _IN_EXEC
    return (code, int(fields[25]), int(fields[47]))


def _do_nothing(number: int, frame: object) -> None:
    """Do nothing: signals are read from the wake-up descriptor."""


def _prctl(option: int, setting: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, int(setting), 0, 0, 0)
