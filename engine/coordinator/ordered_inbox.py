"""What one Worker says, in order and once, in spite of doubles, latecomers and the dead.

Owns: the order of numbered messages of one incarnation. Does not own: how they travel, nor when an
incarnation ends (recovery.py). What a Worker is told needs none of this: it comes over a socket
that belongs to one incarnation.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class OrderedInbox(Generic[T]):
    """Of one Worker. epoch: the incarnation that counts."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self._next = 0
        self._early: dict[int, T] = {}

    def take(self, epoch: int, number: int, message: T) -> list[T]:
        """The messages that can be acted on now, in order. Duplicates and other epochs are dropped;
        early messages are kept until all before them have come.
        """
        # A message may come twice, and a process that was ended may still be heard: what it did is
        # lost with it, and is done again by the next incarnation.
        if epoch != self.epoch or number < self._next:
            return []
        self._early.setdefault(number, message)
        in_turn = []
        while self._next in self._early:
            in_turn.append(self._early.pop(self._next))
            self._next += 1
        return in_turn

    def close(self) -> None:
        """This incarnation is over: the next one's messages count, from its first."""
        self.epoch += 1
        self._next = 0
        self._early.clear()

    @property
    def missing(self) -> int | None:
        """The number that later messages wait for; None where none waits."""
        return self._next if self._early else None
