"""The signals that ask a whole run to stop, in its environments' processes: they do nothing there.

Owns: the handlers, also in what an environment forks. Does not own: what a run does about them. The
same as dataflow/signals.py, which no other interpreter can import.
"""

from __future__ import annotations

import os
import signal

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave_signals_to_the_run() -> None:
    """In the main thread: let stop signals, also waiting ones, do nothing. By a handler, since
    programs that an environment starts would inherit an ignored signal.
    """
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _do_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _do_nothing(number: int, frame: object) -> None:
    """Do nothing: the process of the run decides."""


def _end_by_signals_again() -> None:
    """Let what an environment forks end by them, as a multiprocessing.Pool ends its processes."""
    for number in STOPS:
        if signal.getsignal(number) is _do_nothing:
            is_interrupt = number == signal.SIGINT  # for which Python has a handler of its own
            default = signal.default_int_handler if is_interrupt else signal.SIG_DFL
            signal.signal(number, default)


os.register_at_fork(after_in_child=_end_by_signals_again)
