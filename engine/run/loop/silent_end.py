"""The process of a run is not ended from within without a word.

Owns: what becomes of `os._exit(0)` and `os.exec*` that a user's function calls while a run goes on:
the process ends as asked, but not as one that has done its work; and it becomes no other program.
Does not own: forks, which do as they like; a Worker's own process, whose end is told of in any case
(engine/run/launch/child.py).

CPython tells audit hooks of every exec, by whatever name it is called. It tells nobody of
`os._exit`: every module's name for that leads here during a run, but what a class, a default or a
closure has taken of it before does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import ModuleType
from typing import Any, NoReturn

from dataflow.errors import RunError
from dataflow.safe_text import printable

FAILED = 3
"""The exit code of a run that failed."""
_guarded: list[int] = []
"""The process of each run that goes on here."""


@contextmanager
def no_silent_end(describe_safe: Callable[[], str]) -> Iterator[None]:
    """Inside it, `os._exit(0)` of this process says where it was called and what is safe, and ends
    with 3; `os.exec*` raises RunError. kept: says what is safe.
    """
    end, process = os._exit, os.getpid()

    def tell_and_end(status: int) -> NoReturn:
        if status != 0 or os.getpid() != process:
            end(status)
        message = f"{_caller()}: os._exit(0) ended the process of the run. Safe: {describe_safe()}."
        with suppress(OSError):  # nobody may be reading
            os.write(2, f"{printable(message)} Fix: return, or raise an error.\n".encode())
        end(FAILED)

    _hear_of_exec()
    _guarded.append(process)
    _rebind(end, tell_and_end)
    try:
        yield
    finally:
        _rebind(tell_and_end, end)  # also in modules that were imported meanwhile
        _guarded.remove(process)


def _rebind(before: object, after: object) -> None:
    """Let every name of a module for the one lead to the other."""
    modules = [each for each in list(sys.modules.values()) if isinstance(each, ModuleType)]
    for names in map(vars, modules):
        for name in [name for name, bound in list(names.items()) if bound is before]:
            names[name] = after


@cache
def _hear_of_exec() -> None:
    """Once in a process, since a hook cannot be taken out."""
    sys.addaudithook(_refuse_exec)


def _refuse_exec(event: str, args: tuple[Any, ...]) -> None:
    """Called for each event that CPython tells of, `id` and `open` among them: so it is short."""
    if event == "os.exec" and os.getpid() in _guarded:
        name = "execv" if args[2] is None else "execve"
        problem = f"{_caller()}: os.{name} would end the process of the run"
        raise RunError(f"{problem}. Fix: subprocess.run, which starts a process of its own.")


def _caller() -> str:
    """The line from which a function of os was called."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "os":
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
