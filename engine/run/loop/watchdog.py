"""The watchdog: ends an attempt at a run in which nothing moves.

    thread or process          waits for                         unblocked by
    the watchdog's thread      its next look                     the clock, the end of the run
    the process outside        a beat, or a while without one    the thread, while it can run
                               the end of the run                the end of its pipe

Owns: the thread, and starting and feeding the process that watches from outside (code that holds
the interpreter's lock stops this thread, too). Does not own: what that process does without beats
(watchdog_process.py), signals (signals.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from dataflow import activity
from dataflow.errors import RunError
from dataflow.safe_text import printable
from engine.run.loop import watchdog_process
from engine.run.loop.signals import StopSignals

STACK_SIGNAL = signal.SIGRTMIN + 5 if sys.platform == "linux" else signal.SIGUSR2
"""Makes a process write its threads' stacks, whoever holds the interpreter's lock."""
TO_END = 60.0
"""Seconds for an interrupted run to end."""
_LOCKED = 30.0
"""The least limit for holding the interpreter's lock: importing large libraries takes long."""


class Watchdog:
    """A context that is interrupted once `sign` has kept its value for `limit` seconds (0: never).

    `hung` then says why; it is printed with the stack of every thread. Code that cannot be
    interrupted, or holds the interpreter's lock, is ended with its process by the process outside;
    if it is not in the main thread, it is only named.
    """

    def __init__(
        self,
        limit: float,
        describe: Callable[[], str],
        sign: Callable[[], object] = int,
        signals: StopSignals | None = None,
    ) -> None:
        self.hung = ""
        self._limit = limit
        self._describe = describe
        self._sign = sign
        self._signals = signals or StopSignals()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._outside: OutsideWatch | None = None
        self._runs = 0

    def __enter__(self) -> Watchdog:
        self._runs = threading.get_ident()
        if self._limit > 0:
            if sys.platform == "linux":
                main = threading.current_thread() is threading.main_thread()
                self._outside = OutsideWatch(max(self._limit, _LOCKED), kills=main)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._outside is not None:
            self._outside.close()

    def _watch(self) -> None:
        before, moved = self._sign(), time.monotonic()
        while not self._over.wait(min(1.0, self._limit / 4)):
            if self._outside is not None:
                self._outside.beat()
            now = self._sign()
            if now != before:
                before, moved = now, time.monotonic()
            if time.monotonic() - moved > self._limit:
                try:
                    self._tell_hang()
                finally:  # also where it cannot be told
                    self._interrupt()
                    if self._outside is not None:
                        self._outside.note_interrupt()
                return

    def _tell_hang(self) -> None:
        self.hung = f"nothing has moved for {self._limit:g} s"
        self.hung += f"; {self._describe()}"
        print(printable(self.hung), file=sys.stderr, flush=True)
        _print_stacks()

    def _interrupt(self) -> None:
        if self._signals.handles:
            self._signals.interrupt(self.hung)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._runs), ctypes.py_object(KeyboardInterrupt)
            )


def _print_stacks() -> None:
    """The stack of every thread, where standard error is a file (a notebook's is not)."""
    try:
        faulthandler.dump_traceback(file=sys.stderr)
    except (AttributeError, io.UnsupportedOperation):
        print("(the stacks of the threads cannot be shown here)", file=sys.stderr)


class OutsideWatch:
    """The process that watches this one; started by the constructor."""

    def __init__(self, limit: float, *, kills: bool) -> None:
        """limit: seconds without a beat. kills: whether it then ends this process."""
        board = os.memfd_create("doing", os.MFD_CLOEXEC)
        os.ftruncate(board, watchdog_process.BOARD)
        theirs, self._beats = os.pipe()
        stacks, self._stacks = os.pipe()
        inherited = (theirs, board, stacks)
        self._board = mmap.mmap(board, watchdog_process.BOARD)
        activity.show_on(self._board)
        faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True)
        arguments = [*inherited, int(STACK_SIGNAL), limit, TO_END, int(kills)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", watchdog_process.__file__, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=inherited,
                start_new_session=True,  # no Ctrl-C of a terminal
            )
        except OSError as error:
            raise RunError(
                f"expected the process that watches this one to start, found: {error}. Fix: allow"
                " more processes and open files (ulimit -u, ulimit -n), or --watchdog 0."
            ) from error
        finally:
            for descriptor in inherited:
                os.close(descriptor)

    def beat(self) -> None:
        """Threads can run."""
        self._say(watchdog_process.BEAT)

    def note_interrupt(self) -> None:
        """Note that the thread that hangs was interrupted; it has to end within TO_END seconds."""
        self._say(watchdog_process.INTERRUPTED)

    def close(self) -> None:
        """End the process outside."""
        activity.hide(self._board)
        os.close(self._beats)
        self._process.kill()  # it has nothing to put in order, and somebody may have stopped it
        self._process.wait()
        # Not unregistered: the signal would then end this process.
        faulthandler.register(STACK_SIGNAL, 2, all_threads=True)
        os.close(self._stacks)

    def _say(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # it was killed: the run goes on without it
            os.write(self._beats, what)


@contextlib.contextmanager
def named_hang(watchdog: Watchdog) -> Iterator[None]:
    """Turn the watchdog's interrupt into a RunError that says what hung."""
    try:
        yield
    except KeyboardInterrupt:
        if watchdog.hung:
            raise RunError(watchdog.hung) from None
        raise
