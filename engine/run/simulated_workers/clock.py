"""A virtual clock: actions in the order of their times, and those of one time in the order in which
they were scheduled, so that a run repeats exactly.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable


class VirtualClock:
    """Simulated seconds, which pass from one action to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._set = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action so many seconds from now. Raises ValueError for a negative delay."""
        if seconds < 0:
            raise ValueError(f"expected a time from now on, found {seconds} seconds")
        heapq.heappush(self._actions, (self.now + seconds, self._set, action))
        self._set += 1

    @property
    def idle(self) -> bool:
        """Whether nothing is scheduled."""
        return not self._actions

    @property
    def next(self) -> float:
        """When something else happens; infinite where nothing does."""
        return self._actions[0][0] if self._actions else math.inf

    def step(self) -> bool:
        """Run the next action; False where none is left."""
        if not self._actions:
            return False
        self.now, _, action = heapq.heappop(self._actions)
        action()
        return True
