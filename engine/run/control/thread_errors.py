"""What becomes of an exception that nobody expects in a thread of the engine's own.

Owns: handing it over, since the thread that waits for this one would wait for ever. Does not own:
how the other thread hears of it (whoever takes it: links, rooms, a Supervisor's I/O thread).
"""

from __future__ import annotations

from collections.abc import Callable


class ErrorsTo:
    """A context that hands any exception which leaves it to `take`, and goes on behind it."""

    def __init__(self, take: Callable[[BaseException], None]) -> None:
        self._take = take

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            return False
        self._take(error)
        return True
