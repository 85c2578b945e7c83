"""The process of a run is not ended from within without a word.

Owns: what becomes of `os._exit(0)` and `os.exec*` that a user's function calls while a run goes on:
the process ends as asked, but not as one that has done its work; and it becomes no other program.
Does not own: forks, which do as they like; a Worker's own process, whose end is told of in any case
(engine/launch/child.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from dataflow.errors import RunError
from dataflow.shown import printable

FAILED = 3
"""The exit code of a run that failed."""
_EXECUTES = ("execv", "execve")
"""Functions of os that every other `os.exec*` calls."""


@contextmanager
def no_silent_end(kept: Callable[[], str]) -> Iterator[None]:
    """Inside it, `os._exit(0)` of this process says where it was called and what is safe, and ends
    with 3; `os.exec*` raises RunError. kept: says what is safe.
    """
    end, process = os._exit, os.getpid()
    execute = {name: getattr(os, name) for name in _EXECUTES}

    def tell_and_end(status: int) -> NoReturn:
        if status != 0 or os.getpid() != process:
            end(status)
        message = f"{_caller()}: os._exit(0) ended the process of the run. Safe: {kept()}."
        with suppress(OSError):  # nobody may be reading
            os.write(2, f"{printable(message)} Fix: return, or raise an error.\n".encode())
        end(FAILED)

    def refuse(name: str) -> Callable[..., NoReturn]:
        def refused(*args: Any) -> NoReturn:
            if os.getpid() != process:
                execute[name](*args)
            problem = f"{_caller()}: os.{name} would end the process of the run"
            raise RunError(f"{problem}. Fix: subprocess.run, which starts a process of its own.")

        return refused

    os._exit = tell_and_end
    for name in _EXECUTES:
        setattr(os, name, refuse(name))
    try:
        yield
    finally:
        os._exit = end
        for name in _EXECUTES:
            setattr(os, name, execute[name])


def _caller() -> str:
    """The line from which a function of os was called."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "os":
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
