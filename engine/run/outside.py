"""A watch on this process from outside: what holds the interpreter's lock stops the threads that
watch, too.

    the watcher waits for          unblocked by
    a beat, or a while without one the watchdog's thread of the run, while it can run
    the end of the run             its end of the pipe is closed, by whatever ended it

Owns: the watcher's process and what it is shown of what is under way. Does not own: what it does
when beats stay away (watcher.py), nor when nothing has moved for too long (stop.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

from dataflow.errors import RunError
from engine.run import watcher

STACK_SIGNAL = signal.SIGRTMIN + 5 if sys.platform == "linux" else signal.SIGUSR2
"""Makes a process of a run write the stacks of its threads, whoever holds the interpreter's lock.
"""

TO_END = 60.0
"""Seconds in which a run that was interrupted has ended."""

_board: mmap.mmap | None = None
"""One for this process: of several runs in it one at a time computes."""


def show(text: str) -> None:
    """What is under way from now on; for the watcher of this process, where there is one."""
    if _board is not None:
        _board[:] = text.encode(errors="backslashreplace")[: watcher.BOARD].ljust(
            watcher.BOARD, b"\0"
        )


class Outside:
    """The watcher of this process; started by the constructor."""

    def __init__(self, limit: float, *, kills: bool) -> None:
        """limit: seconds without a beat. kills: whether it then ends this process, or only says
        where it stands.
        """
        global _board
        board = os.memfd_create("doing", os.MFD_CLOEXEC)
        os.ftruncate(board, watcher.BOARD)
        theirs, self._beats = os.pipe()
        stacks, self._stacks = os.pipe()
        given = (theirs, board, stacks)
        _board = self._board = mmap.mmap(board, watcher.BOARD)
        faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True)
        arguments = [*given, int(STACK_SIGNAL), limit, TO_END, int(kills)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(watcher.__file__)), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=given,
                start_new_session=True,  # no Ctrl-C of a terminal
            )
        except OSError as error:
            raise RunError(
                f"expected the process that watches this one to start, found: {error}. Fix: allow"
                " more processes and open files (ulimit -u, ulimit -n), or --watchdog 0."
            ) from error
        finally:
            for descriptor in given:
                os.close(descriptor)

    def beat(self) -> None:
        """Threads can run."""
        self._say(watcher.BEAT)

    def interrupted(self) -> None:
        """The thread that hangs was interrupted, and is to come to its end soon."""
        self._say(watcher.INTERRUPTED)

    def close(self) -> None:
        """End the watcher."""
        global _board
        if _board is self._board:
            _board = None
        os.close(self._beats)
        self._process.wait()
        faulthandler.register(
            STACK_SIGNAL, 2, all_threads=True
        )  # not undone: it would then end the process
        os.close(self._stacks)

    def _say(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # it was killed: the run goes on without
            os.write(self._beats, what)
