"""What a Worker was told and has not begun, in the order in which it will begin.

Owns: that order. Does not own: carrying it out (process.py), the order in which things were
told (the coordinator).

First come, first served, but weights, Go and requests pass queued chunks (and nothing else), so
that a load comes before the next chunk and a checkpoint is not held up by generation. A Release
never comes here: it waits for nothing.
"""

from __future__ import annotations

import threading

from engine.coordinator.messages import Go, Load, Offer, RunChunk, ToWorker
from engine.launch.control import Request

Item = ToWorker | Request

_PASSING = (Load, Offer, Go, Request)


class Inbox:
    """Filled by one thread, emptied by another."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._begun: Item | None = None
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: Item) -> None:
        """Add it where it belongs."""
        with self._changed:
            self._items.insert(self._place(item), item)
            self._changed.notify()

    def take(self) -> Item | None:
        """The next one, waiting for it; None once the inbox is closed, whatever is left in it."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            self._begun = None if self._closed else self._items.pop(0)
            return self._begun

    def within(self) -> Request | None:
        """What may be carried out before what was taken last has ended: a request that waits for
        nothing else, where that is a chunk. All else is done to its end: ranks offer weights
        together, and answer requests together.
        """
        with self._changed:
            if (
                isinstance(self._begun, RunChunk)
                and self._items
                and isinstance(first := self._items[0], Request)
            ):
                del self._items[0]
                return first
            return None

    def has_weights(self) -> bool:
        """Whether weights wait here: later ones must not come before them."""
        with self._changed:
            return any(isinstance(item, Load) for item in self._items)

    def forget(self) -> int:
        """Drop every instruction, but no request, for which somebody waits; how many these were."""
        with self._changed:
            kept: list[Item] = [item for item in self._items if isinstance(item, Request)]
            dropped = len(self._items) - len(kept)
            self._items = kept
            return dropped

    def close(self) -> None:
        """Wake whoever waits: nothing comes any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _place(self, item: Item) -> int:
        place = len(self._items)
        while place and isinstance(item, _PASSING) and isinstance(self._items[place - 1], RunChunk):
            place -= 1
        return place
