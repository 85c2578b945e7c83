"""An error that means that the operating system gives this user no more processes or threads.

Owns: knowing it in what Python, Rust and our own code raise. Does not own: how a command ends
(engine/cli/__init__.py).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

PANIC = "PanicException"
"""What Rust's libraries raise where they did not expect to fail; no Exception."""
TOLD = (
    "this user may start no more processes or threads. Fix: a higher limit (ulimit -u), or fewer of"
    " them (--threads 1, --workers one)."
)


def is_exhausted(error: BaseException) -> bool:
    """Whether that is what an error comes from, unless its own text says so."""
    return "ulimit -u" not in str(error) and any(map(_is_refused, _causes(error)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_refused(error: BaseException) -> bool:
    """CPython's own words for a thread, and what fork and clone return."""
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN
    text = str(error)
    thread = isinstance(error, RuntimeError) and "can't start new thread" in text
    return thread or (type(error).__name__ == PANIC and "Resource temporarily unavailable" in text)
