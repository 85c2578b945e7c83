"""What a Worker was sent and has not begun, in the order in which it will begin.

Owns: this order. Does not own: carrying anything out (worker_process.py).

First in, first out; but weights, Go and requests pass queued chunks, so that the next chunk has the
new weights and generation does not hold up a checkpoint. Only weights pass a chunk that several
ranks run. A Release never comes here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.protocol.messages import Go, Load, Offer, RunChunk, ToWorker
from engine.run.control.control import Request

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
        """Add it at its place in the order."""
        with self._changed:
            self._items.insert(self._position(item), item)
            self._changed.notify()

    def take(self) -> Item | None:
        """Wait for the next item; None once the inbox is closed, even if items are left."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            self._begun = None
            if not self._closed:
                self._begun = self._items.pop(0)
            return self._begun

    def within(self, passes: Callable[[ToWorker], bool] = lambda _: False) -> Item | None:
        """The next item, if a chunk runs and it is a request, or an instruction that passes; ranks
        do all else in one order.
        """
        with self._changed:
            if not isinstance(self._begun, RunChunk) or not self._items:
                return None
            first = self._items[0]
            if not isinstance(first, Request) and not passes(first):
                return None
            del self._items[0]
            return first

    def remove(self, item: Item) -> None:
        """Take this one out, wherever it is."""
        with self._changed:
            self._items = [other for other in self._items if other is not item]

    def wait_for(self, wanted: Callable[[ToWorker], bool]) -> Item | None:
        """Wait for the first item that is wanted, or a request, which pass all others; None once
        the inbox is closed.
        """

        def find() -> Item | None:
            for item in self._items:
                if isinstance(item, Request) or wanted(item):
                    return item
            return None

        with self._changed:
            self._changed.wait_for(lambda: self._closed or find() is not None)
            item = None if self._closed else find()
            self._items = [other for other in self._items if other is not item]
            return item

    def has_weights(self) -> bool:
        """Whether weights wait here: later ones must not pass them."""
        with self._changed:
            return any(isinstance(item, Load) for item in self._items)

    def forget(self) -> int:
        """Drop all instructions and return how many; requests stay, as somebody waits for them."""
        with self._changed:
            before = len(self._items)
            self._items = [item for item in self._items if isinstance(item, Request)]
            return before - len(self._items)

    def close(self) -> None:
        """Let `take` return None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _position(self, item: Item) -> int:
        at = len(self._items)
        while at and _passes(item, self._items[at - 1]):
            at -= 1
        return at


def _passes(item: Item, waiting: Item) -> bool:
    """Whether an item is carried out before one that came earlier. All ranks carry out what they do
    together in one order; weights are loaded by each alone.
    """
    if not (isinstance(item, _PASSING) and isinstance(waiting, RunChunk)):
        return False
    return isinstance(item, Load) or not waiting.giver
