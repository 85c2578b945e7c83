"""The process of a run is not ended from within without a word.

Owns: what becomes of `os._exit(0)` that a user's function calls while a run goes on: the process
ends, as asked, but not as one that has done its work. Does not own: forks, which end as they like;
a Worker's own process, whose end is told of in any case (engine/launch/child.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from dataflow.shown import printable

FAILED = 3
"""The exit code of a run that failed."""


@contextmanager
def no_silent_end(kept: Callable[[], str]) -> Iterator[None]:
    """Inside it, `os._exit(0)` of this process says where it was called and what is safe, and ends
    with 3. kept: says what is safe.
    """
    end, process = os._exit, os.getpid()

    def tell_and_end(status: int) -> NoReturn:
        if status != 0 or os.getpid() != process:
            end(status)
        caller = sys._getframe(1)
        place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
        told = f"{place}: os._exit(0) ended the process of the run. Safe: {kept()}."
        with suppress(OSError):  # nobody may be reading
            os.write(2, f"{printable(told)} Fix: return, or raise an error.\n".encode())
        end(FAILED)

    os._exit = tell_and_end
    try:
        yield
    finally:
        os._exit = end
