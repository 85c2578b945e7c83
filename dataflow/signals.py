"""The signals that ask a whole run to stop, and the processes of a run that ignore them.

Owns: which signals these are, and how a started process receives none of them until it can ignore
them. Does not own: what a run does about them (engine/run/loop/signals.py).

A terminal sends Ctrl-C to every process of a run, a batch system SIGTERM. Only the run's own
process reacts: if its Workers ended by themselves, nobody would be left to write a checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_ignored(number: int) -> bool:
    """Whether a signal was ignored when this process began, as SIGHUP under nohup; it stays so."""
    return signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def hold_back_signals() -> Iterator[None]:
    """Processes that this thread starts inside it get no stop signal before they call
    `leave_signals_to_the_run`: signals wait until then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_the_run() -> None:
    """In the main thread of a process that a run started: let stop signals, also waiting ones, do
    nothing.

    By a handler, since processes that the user's functions start would inherit an ignored signal.
    """
    for number in STOPS:
        if not is_ignored(number):
            signal.signal(number, _nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _nothing(number: int, frame: object) -> None:
    """Do nothing: the process of the run decides."""


_resets: list[Callable[[], None]] = []
_masks = threading.local()
"""Each thread's mask before it forks: other threads may fork at the same time."""


def call_in_forked_child(reset: Callable[[], None]) -> None:
    """Call this in every forked child, before a stop signal can reach it."""
    _resets.append(reset)


def _before_fork() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    for reset in _resets:
        reset()
    _after_fork()


def _end_by_signals_again() -> None:
    """Let children that the user's function forks end by these signals, as a pool ends its children
    by SIGTERM.
    """
    for number in STOPS:
        if signal.getsignal(number) is _nothing:
            is_interrupt = number == signal.SIGINT  # for which Python has a handler of its own
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


call_in_forked_child(_end_by_signals_again)
os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
