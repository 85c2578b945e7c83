"""How much one client of a stream gets: events a second, and bytes a second.

Owns: this limit. Does not own: what is sent.
"""

from __future__ import annotations

from collections.abc import Callable

EVENTS_A_SECOND = 5.0
BYTES_A_SECOND = 50_000.0


class Pace:
    """Says whether an event may be sent now. clock: in seconds.

    Over any stretch of time, no more is sent than the stretch allows and one second's worth, or one
    event, before it. An event larger than a second's worth is sent once all that it takes is saved.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = clock()
        self._events = 1.0
        self._bytes = BYTES_A_SECOND

    def may_send(self) -> bool:
        """Whether the next event may be sent now."""
        now = self._clock()
        passed, self._at = now - self._at, now
        self._events = min(1.0, self._events + passed * EVENTS_A_SECOND)
        self._bytes = min(BYTES_A_SECOND, self._bytes + passed * BYTES_A_SECOND)
        return self._events >= 1.0 - 1e-9 and self._bytes > 0

    def sent(self, size: int) -> None:
        """An event of so many bytes has been sent."""
        self._events -= 1.0
        self._bytes -= size
