"""A descriptor that becomes readable when another thread says so.

Owns: that. Does not own: who waits for it (pool.py, routing.py).
"""

from __future__ import annotations

import contextlib
import os
from threading import Lock


class WakeUp:
    """Register `fileno()` with a selector; `wake` makes it readable until `clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._is_closed = False
        self._lock = Lock()

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._reader

    def wake(self) -> None:
        """Callable from any thread; many calls before a `clear` are one, and after `close` nothing
        happens.
        """
        # Its number may be that of another file by then.
        with self._lock:
            if self._is_closed:
                return
            # A full pipe is readable already.
            with contextlib.suppress(BlockingIOError):
                os.write(self._writer, b"w")

    def clear(self) -> bool:
        """Take all calls; returns whether there were any."""
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._reader, 4096))
        return False

    def close(self) -> None:
        """Close both ends."""
        with self._lock:
            self._is_closed = True
            os.close(self._reader)
            os.close(self._writer)
