"""The watchdog: what stops an attempt at a run in which nothing moves; and whether its end was
asked for.

Owns: the thread that notices that nothing moves. Does not own: signals (signals.py), what stopping
means (the coordinator ends the Step under way and writes a checkpoint).
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import sys
import threading
import time
from collections.abc import Callable

from dataflow.shown import printable
from engine.run.outside import Outside
from engine.run.signals import StopSignals

_OUTSIDE = 30.0
"""Seconds at least for which the interpreter's lock may be held: an import of large libraries takes
some.
"""


class Stop:
    """`requested` once the end of the run was asked for. Use as a context manager.

    watchdog: seconds in which neither `alive` was called nor `sign` gave another value, after which
    `describe` is printed with the stack of every thread, and the thread that runs is interrupted
    (`hung` says why); 0 is never. A thread other than the main one gets no signals, and what never
    returns to Python cannot be interrupted, only named. In the main thread, what cannot be
    interrupted ends by the end of the process, and so does what holds the interpreter's lock, by a
    process outside (outside.py).
    """

    def __init__(
        self,
        watchdog: float,
        describe: Callable[[], str],
        sign: Callable[[], object] = int,
        signals: StopSignals | None = None,
    ) -> None:
        self.signals = signals or StopSignals()
        self.hung = ""
        self._watchdog = watchdog
        self._describe = describe
        self._sign = sign
        self._last = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._outside: Outside | None = None
        self._runs = 0

    @property
    def requested(self) -> bool:
        """Whether a signal asked for the end."""
        return self.signals.requested

    @property
    def reason(self) -> str:
        """Which."""
        return self.signals.reason

    def alive(self) -> None:
        """Something moved."""
        self._last = time.monotonic()

    def __enter__(self) -> Stop:
        self.alive()
        self._runs = threading.get_ident()
        if self._watchdog > 0:
            if sys.platform == "linux":
                self._outside = Outside(
                    max(self._watchdog, _OUTSIDE),
                    kills=threading.current_thread() is threading.main_thread(),
                )
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
                print(printable(self.hung), file=sys.stderr, flush=True)
                _print_stacks()
                self._interrupt()
                if self._outside is not None:
                    self._outside.interrupted()
                return

    def _interrupt(self) -> None:
        if self.signals.handles:
            self.signals.interrupt(self.hung)
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
