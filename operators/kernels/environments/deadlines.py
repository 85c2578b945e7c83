"""Times at which something has to be done, of many owners.

Owns: who is due. Does not own: what is done then, waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable


class Deadlines:
    """At most one deadline of each owner; setting, moving and clearing one costs the same however
    many there are.
    """

    def __init__(self) -> None:
        self._due: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._soonest = math.inf
        """No deadline is before it; there may be none at it any more."""

    def set(self, owner: Hashable, seconds: float, action: Callable[[], None]) -> None:
        """Do this in so many seconds, in the place of what the owner had."""
        due = time.monotonic() + seconds
        self._due[owner] = (due, action)
        self._soonest = min(self._soonest, due)

    def clear(self, owner: Hashable) -> None:
        """The owner has none any more."""
        self._due.pop(owner, None)

    def seconds_left(self) -> float:
        """Until `run` may have something to do; infinite if there is no deadline."""
        if not self._due:
            return math.inf
        return max(0.0, self._soonest - time.monotonic())

    def run(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if now < self._soonest:
            return
        late = [owner for owner, (due, _) in self._due.items() if due <= now]
        for owner in late:
            if owner in self._due:  # else one before it has cleared it
                _, action = self._due.pop(owner)
                action()
        self._soonest = min((due for due, _ in self._due.values()), default=math.inf)
