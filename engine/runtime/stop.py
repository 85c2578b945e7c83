"""Ctrl-C and the watchdog: the two ways in which a run is stopped from outside.

Owns: the signal handler and the thread that notices that nothing moves. Does not own: what
stopping means (the coordinator ends the Step under way and writes a checkpoint).
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from engine.runtime.outside import Outside

_OUTSIDE = 30.0
"""Seconds at least for which the interpreter's lock may be held: an import of large libraries takes some."""


class Stop:
    """`requested` after the first Ctrl-C; the second raises KeyboardInterrupt. Use as a context manager.

    watchdog: seconds in which neither `alive` was called nor `sign` gave another value, after which `describe` is
    printed with the stack of every thread, and the thread that runs is interrupted (`hung` says why); 0 is never. A
    thread other than the main one gets no signals: there Ctrl-C is whoever started it's own, and what never returns to
    Python cannot be interrupted, only named. In the main thread, what cannot be interrupted ends by the end of the
    process, and so does what holds the interpreter's lock, by a process outside (outside.py).
    """

    def __init__(self, watchdog: float, describe: Callable[[], str], sign: Callable[[], object] = int) -> None:
        self.requested = False
        self.reason = "stopped by Ctrl-C"
        self.hung = ""
        self._watchdog = watchdog
        self._describe = describe
        self._sign = sign
        self._last = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._outside: Outside | None = None
        self._runs = 0
        self._handles = False
        self._previous: Any = None

    def alive(self) -> None:
        """Something moved."""
        self._last = time.monotonic()

    def __enter__(self) -> Stop:
        self.alive()
        self._runs = threading.get_ident()
        self._handles = threading.current_thread() is threading.main_thread()
        if self._handles:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        if self._watchdog > 0:
            if sys.platform == "linux":
                self._outside = Outside(max(self._watchdog, _OUTSIDE), kills=self._handles)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._outside is not None:
            self._outside.close()
        if self._handles:
            signal.signal(signal.SIGINT, signal.SIG_DFL if self._previous is None else self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.requested or self.hung:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping after this Step with a checkpoint; Ctrl-C again to stop now", file=sys.stderr, flush=True)

    def _watch(self) -> None:
        before = self._sign()
        while not self._over.wait(min(1.0, self._watchdog / 4)):
            if self._outside is not None:
                self._outside.beat()
            now = self._sign()
            if now != before:
                before = now
                self.alive()
            if time.monotonic() - self._last > self._watchdog:
                self.hung = f"nothing has moved for {self._watchdog:g} s; {self._describe()}"
                print(self.hung, file=sys.stderr, flush=True)
                _print_stacks()
                self._interrupt()
                if self._outside is not None:
                    self._outside.interrupted()
                return

    def _interrupt(self) -> None:
        if self._handles:  # a signal also ends what waits for a lock
            signal.pthread_kill(self._runs, signal.SIGINT)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._runs), ctypes.py_object(KeyboardInterrupt))


def _print_stacks() -> None:
    """The stack of every thread, where standard error is a file (a notebook's is not)."""
    try:
        faulthandler.dump_traceback(file=sys.stderr)
    except (AttributeError, io.UnsupportedOperation):
        print("(the stacks of the threads cannot be shown here)", file=sys.stderr)
