"""How much one client of a stream gets: events a second, and bytes a second.

Owns: this limit. Does not own: what is sent.
"""

from __future__ import annotations

from collections.abc import Callable

EVENTS_A_SECOND = 5.0
BYTES_A_SECOND = 50_000.0


class Pace:
    """Says whether an event may be sent now. clock: in seconds.

    After an event, the next waits for as long as its bytes and its being one take: over any stretch
    of time, no more is sent than the stretch allows and the one event at its beginning.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next = clock()

    def may_send(self) -> bool:
        """Whether the next event may be sent now."""
        return self._clock() >= self._next - 1e-9

    def count_sent(self, size: int) -> None:
        """Count an event of so many bytes as sent: the next has to wait."""
        self._next = self._clock() + max(1.0 / EVENTS_A_SECOND, size / BYTES_A_SECOND)
