"""What a Worker was told and has not begun, in the order in which it will begin.

Owns: that order. Does not own: carrying it out (process.py), the order in which things were
told (the coordinator).

First come, first served, but two things do not wait behind chunks: a Release passes everything
and may be carried out inside a running chunk; weights, Go and requests pass queued chunks (and
nothing else), so that a load comes before the next chunk and a checkpoint is not held up by
generation.
"""

from __future__ import annotations

import threading
from collections import deque

from engine.coordinator.messages import Follow, Go, Offer, Publish, Release, RunChunk, ToWorker
from engine.runtime.control import Asked

Item = ToWorker | Asked

_PASSING = (Publish, Follow, Offer, Go, Asked)


class Inbox:
    """Filled by one thread, emptied by another."""

    def __init__(self) -> None:
        self._releases: deque[Release] = deque()
        self._items: list[Item] = []
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: Item) -> None:
        """Add it where it belongs."""
        with self._changed:
            if isinstance(item, Release):
                self._releases.append(item)
            else:
                self._items.insert(self._place(item), item)
            self._changed.notify()

    def take(self) -> Item | None:
        """The next one, waiting for it; None once the inbox is closed, whatever is left in it."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._releases or self._items)
            if self._closed:
                return None
            return self._releases.popleft() if self._releases else self._items.pop(0)

    def within(self) -> Item | None:
        """What may be carried out while a chunk is suspended: a Release, or a request that waits for chunks alone."""
        with self._changed:
            if self._releases:
                return self._releases.popleft()
            return self._items.pop(0) if self._items and isinstance(self._items[0], Asked) else None

    def has_weights(self) -> bool:
        """Whether weights wait here: later ones must not come before them."""
        with self._changed:
            return any(isinstance(item, (Publish, Follow)) for item in self._items)

    def forget(self) -> int:
        """Drop every instruction but Release (and requests, which somebody waits for); how many these were."""
        with self._changed:
            kept: list[Item] = [item for item in self._items if isinstance(item, Asked)]
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
