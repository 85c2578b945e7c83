"""Which rows of a task wait, write or are parked, and in which order the waiting ones enter slots.

Owns: the state of each row and the order. Does not own: how many slots are free (turns.py), keys
(decode_step.py and its implementations).

Rows that were extended enter first: in the order of the calls of `extend`, those of one call by
their numbers. Then rows that have not begun, by their numbers. Nothing else matters, so the same
calls give the same order.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from itertools import islice

import numpy as np

from dataflow.errors import KernelError


class RowState(IntEnum):
    """Where a row is. EXTENDED: parked, and waiting to go on. DROPPED: it never writes again."""

    UNBEGUN = 0
    EXTENDED = 1
    LIVE = 2
    PARKED = 3
    DROPPED = 4


class TurnQueue:
    """The rows 0 .. rows - 1 of a task, of which none has begun."""

    def __init__(self, rows: int) -> None:
        self._states = np.full(rows, RowState.UNBEGUN, np.int8)
        self._extended: deque[int] = deque()
        self._unbegun = deque(range(rows))

    @property
    def waiting(self) -> int:
        """How many rows would enter free slots."""
        return len(self._extended) + len(self._unbegun)

    def admit(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Make the next rows live, at most so many: those that go on, in the order of the queue,
        and those that begin, ascending. int64.
        """
        extended = _pop_first(self._extended, count)
        unbegun = _pop_first(self._unbegun, count - len(extended))
        self._states[extended] = self._states[unbegun] = RowState.LIVE
        return extended, unbegun

    def park(self, rows: np.ndarray) -> None:
        """The turn of these live rows has ended."""
        self._states[rows] = RowState.PARKED

    def extend(self, rows: np.ndarray) -> None:
        """Let parked rows wait. Raises KernelError for others."""
        self._require(rows, (RowState.PARKED,), "a parked row to extend")
        self._states[rows] = RowState.EXTENDED
        self._extended.extend(np.sort(rows).tolist())

    def drop(self, rows: np.ndarray) -> None:
        """Let rows write never again. Raises KernelError for live ones and those dropped before."""
        droppable = (RowState.PARKED, RowState.EXTENDED, RowState.UNBEGUN)
        self._require(rows, droppable, "a row to drop that is not live")
        self._states[rows] = RowState.DROPPED
        self._extended = self._keep_waiting(self._extended)
        self._unbegun = self._keep_waiting(self._unbegun)

    def _keep_waiting(self, queue: deque[int]) -> deque[int]:
        return deque(row for row in queue if self._states[row] != RowState.DROPPED)

    def _require(self, rows: np.ndarray, allowed: tuple[RowState, ...], what: str) -> None:
        wrong = np.flatnonzero(~np.isin(self._states[rows], allowed))
        for row in rows[wrong].tolist():
            state = RowState(self._states[row]).name.lower()
            raise KernelError(
                f"turns of row {row}: expected {what}, found one that is {state}. Fix: extend or"
                " drop rows that `step` returned, once each."
            )


def _pop_first(queue: deque[int], count: int) -> np.ndarray:
    first = list(islice(queue, count))
    for _ in first:
        queue.popleft()
    return np.array(first, np.int64)
