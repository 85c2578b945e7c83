"""Ctrl-C, SIGTERM and SIGHUP: requests from outside to stop a run.

    signal                    does
    the first                 the Step under way ends, a checkpoint is written; exit 130, 143 or 129
    `grace` seconds later     the process ends without a checkpoint; the last one stays good
    a second                  the process ends at once

Owns: the handlers, the time limit for stopping, how the process of a command ends. Does not own:
what ends a Step (the coordinator), processes that only serve a run (dataflow/signals.py).

One request may arrive several times: `timeout` signals a process and its group; `uv run` or a shell
forwards what the terminal sent already. Signals within 0.1 s of the first are the same request.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from dataflow.signals import STOPS, call_in_forked_child, is_ignored

SAME = 0.1
"""Seconds within which a further signal is the same request."""
REPEAT = 0.1
"""Seconds after which an interrupt that the run's thread has not heard is sent again."""
_OVER = 0
"""In place of a signal's number: the run is over."""
_command = False
"""Whether this process is a command, which may be ended; else it is a notebook's or a script's."""


_DOING = "stopping after this Step with a checkpoint"
"""What follows the first signal."""


class Signalled(KeyboardInterrupt):
    """A signal ended a run at once, in a process that is not a command's own."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class StopSignals:
    """A context in which stop signals end the run; in another thread than the main one, no signals
    come. `is_stop_requested` is True after the first.

    A thread reads signals from the descriptor that Python's C handler writes to, since Python's own
    handlers wait while the main thread is in a kernel.
    """

    def __init__(
        self,
        grace: float = 60.0,
        describe_safe: Callable[[], str] = lambda: "",
    ) -> None:
        """grace: seconds from the first signal to an end without a checkpoint. describe_safe: says
        what is safe.
        """
        self.number = 0
        """The first signal; 0 while there is none."""
        self._grace = grace
        self._describe_safe = describe_safe
        self._raises = ""
        self._has_raised = False
        self._is_over = False
        # Held by who sends an interrupt, so that none is sent to a run that is over.
        self._sending = threading.Lock()
        self._runs = 0
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self._terminals: list[int] = []
        self._heard: socket.socket | None = None
        self._told: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_stop_requested(self) -> bool:
        """Whether the run is to end."""
        return self.number != 0

    @property
    def reason(self) -> str:
        """Why the run ends, for its last line."""
        return f"stopped by {name(self.number)}" if self.number else ""

    @property
    def handles(self) -> bool:
        """Whether signals come here."""
        return bool(self._previous)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._runs = threading.get_ident()
        self._terminals = [fd for fd in (1, 2) if _is_terminal(fd)]
        self._heard, self._told = socket.socketpair()
        self._told.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="stop signals", daemon=True)
        self._thread.start()
        # Before the handlers: a signal in between is read by the thread, and not lost.
        self._previous_fd = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        self._previous = _handlers()
        for number in self._previous:
            signal.signal(number, self._on_signal)
        _handling.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is None or self._heard is None or self._told is None:
            return
        with self._sending:
            self._is_over = True
        _handling.remove(self)
        self.let_go()
        self._told.send(bytes([_OVER]))
        self._thread.join()
        self._heard.close()
        self._told.close()

    def let_go(self) -> None:
        """Restore the handlers that were there before."""
        _restore(self._previous)
        with suppress(ValueError, OSError):  # its owner may have closed it
            signal.set_wakeup_fd(self._previous_fd)

    def interrupt(self, why: str) -> None:
        """From any thread: raise KeyboardInterrupt in the run's, even if that waits for a lock.

        The watching thread repeats it until it is heard: Python looks for signals before it waits
        for a lock, and one that comes between the two wakes nobody.
        """
        with self._sending:
            if not self._is_over:
                self._raises, self._has_raised = why, False
                signal.pthread_kill(self._runs, signal.SIGINT)

    def _repeat_interrupt(self) -> None:
        with self._sending:
            if not (self._is_over or self._has_raised):
                signal.pthread_kill(self._runs, signal.SIGINT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the run's thread; the watching thread does all else."""
        # It runs between any two instructions of whatever the thread does, perhaps with a lock
        # held: so it takes no lock, prints nothing and writes nothing. It only raises, when asked.
        del frame
        if self._raises:
            self._has_raised = True
            raise Signalled(self.number or number, self._raises)

    def _watch(self) -> None:
        """The watching thread."""
        first = self._until(None)
        if not first:
            return
        began = time.monotonic()
        self.number = first
        same: int | None = first
        while same not in (None, _OVER):
            same = self._until(began + min(SAME, self._grace))
        again = "Ctrl-C again" if first == signal.SIGINT else "another signal"
        _say(f"\n{name(first)}: {_DOING}, within {self._grace:g} s; {again} to stop now")
        second = _OVER if same == _OVER else self._until(began + self._grace)
        if second == _OVER:
            return
        if second is None:
            late = f"{_DOING} took longer than --grace {self._grace:g} s"
            self._end(first, f"ended by {name(first)}: {late}; safe: {self._describe_safe()}")
        else:
            safe = self._describe_safe()
            self._end(second, f"ended at once by {name(second)}; safe: {safe}")
        self._until(None)

    def _until(self, end: float | None) -> int | None:
        """The next stop signal; _OVER once the run is over; None after this time."""
        assert self._heard is not None
        poller = select.poll()
        poller.register(self._heard, select.POLLIN)
        while True:
            unheard = bool(self._raises) and not self._has_raised
            repeat_at = None
            if unheard:
                repeat_at = time.monotonic() + REPEAT
            until = _first_of(end, repeat_at)
            if not poller.poll(_milliseconds_until(until)):
                if end is not None and end <= time.monotonic():
                    return None
                self._repeat_interrupt()
                continue
            number = self._heard.recv(1)[0]
            if number == signal.SIGHUP:
                _leave_terminals(self._terminals)
            if number == _OVER or (number in self._previous and not self._raises):
                return number

    def _end(self, number: int, why: str) -> None:
        if _command:
            end_command(number, why)
        self.interrupt(why)


_handling: list[StopSignals] = []
"""The instances that handle signals now."""


def _forget_in_child() -> None:
    """A forked child is not part of the run: a signal ends it as it would any process."""
    for each in _handling:
        each.let_go()
    _handling.clear()


call_in_forked_child(_forget_in_child)


@contextmanager
def ending_command() -> Iterator[None]:
    """This process is a command: a stop signal that no run handles ends it, and prints one line."""
    global _command
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _handlers()
    for number in before:
        signal.signal(number, lambda number, frame: end_command(number, f"ended by {name(number)}"))
    _command = True
    try:
        yield
    finally:
        _command = False
        _restore(before)


def end_command(number: int, why: str) -> NoReturn:
    """End this process now, with the exit code that a shell expects after a signal."""
    # Cleaning up may be what hangs. The kernel ends child processes; files are whole or temporary.
    with suppress(OSError):
        os.write(2, f"{why}\n".encode())
    os._exit(code(number))


def code(number: int) -> int:
    """The exit code of a process that this signal ended."""
    return 128 + number


def name(number: int) -> str:
    """The name that users know."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _handlers() -> dict[int, Any]:
    """The handlers of stop signals; without SIGHUP where nohup has it ignored."""
    numbers = set(STOPS)
    if is_ignored(signal.SIGHUP):
        numbers.discard(signal.SIGHUP)
    return {number: signal.getsignal(number) for number in STOPS if number in numbers}


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _first_of(*times: float | None) -> float | None:
    """The earliest of these times; None where each is."""
    return min((time for time in times if time is not None), default=None)


def _milliseconds_until(end: float | None) -> int | None:
    """How long `poll` is to wait; None for ever."""
    if end is None:
        return None
    seconds = max(0.0, end - time.monotonic())
    return math.ceil(seconds * 1e3)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


def _leave_terminals(terminals: list[int]) -> None:
    """Redirect output to /dev/null where its terminal is gone, since that refuses writes."""
    for fd in terminals:
        if not _is_terminal(fd):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # its reader is gone
        print(text, file=sys.stderr, flush=True)
