"""An error that means that the operating system gives this user no more processes or threads.

Owns: knowing it in what Python, Rust and our own code raise. Does not own: how a command ends
(engine/cli/__init__.py).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

PANIC = "PanicException"
"""What Rust's libraries raise where they did not expect to fail; no Exception."""
EXHAUSTED = (
    "this user may start no more processes or threads. Fix: a higher limit (ulimit -u), or fewer of"
    " them (--threads 1, --workers one)."
)
"""What the command says in the place of the error's own words."""


def is_exhausted(error: BaseException) -> bool:
    """Whether an error comes from that limit; not if its own text says so already."""
    return "ulimit -u" not in str(error) and any(map(_is_refused, _causes(error)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Follow an error to its first cause, itself included."""
    while error is not None:
        yield error
        error = error.__cause__


def _is_refused(error: BaseException) -> bool:
    """Whether this is how a thread or a process was refused."""
    if isinstance(error, OSError):  # what fork and clone return
        return error.errno == errno.EAGAIN
    if isinstance(error, RuntimeError):  # CPython's own words for a thread
        return "can't start new thread" in str(error)
    is_panic = type(error).__name__ == PANIC
    return is_panic and "Resource temporarily unavailable" in str(error)
