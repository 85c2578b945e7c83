"""Which rows of a loop wait, write or are parked, and in which order the waiting ones enter slots.

Owns: the state of each row and the order. Does not own: how many slots are free (turns.py), keys
(decode_step.py and its implementations), the order of rows that begin (row_queue.py).

Rows that were extended enter first: in the order of the calls of `extend`, those of one call by
their numbers. Then rows that have not begun. Nothing else matters, so the same calls give the same
order.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from itertools import islice

import numpy as np

from dataflow.errors import KernelError
from operators.kernels.decoding import DecodeTask
from operators.kernels.row_queue import RowQueue


class RowState(IntEnum):
    """Where a row is. EXTENDED: parked, and waiting to go on. DROPPED: it never writes again, and
    its number may be another row's.
    """

    UNBEGUN = 0
    EXTENDED = 1
    LIVE = 2
    PARKED = 3
    DROPPED = 4


class TurnQueue:
    """The rows of a task, of which none has begun, and of those that join it."""

    def __init__(self) -> None:
        self._states = np.zeros(0, np.int8)
        self._extended: deque[int] = deque()
        self._unbegun = RowQueue()

    @property
    def waiting(self) -> int:
        """How many rows would enter free slots."""
        return len(self._extended) + self._unbegun.count

    def add(self, rows: np.ndarray, task: DecodeTask) -> None:
        """Let the rows of a task wait, int64 [rows]: their numbers, in its order."""
        more = int(rows.max()) + 1 - len(self._states)
        if more > 0:
            self._states = np.pad(self._states, (0, more), constant_values=RowState.DROPPED)
        self._states[rows] = RowState.UNBEGUN
        prompt_of_row = np.repeat(np.arange(len(task.prompts)), task.row_counts)
        self._unbegun.add(rows, prompt_of_row, task.row_weights)

    def admit(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Make the next rows live, at most so many: those that go on, in the order of the queue,
        and those that begin. int64.
        """
        extended = _pop_first(self._extended, count)
        unbegun = self._unbegun.take(count - len(extended))
        self._states[extended] = self._states[unbegun] = RowState.LIVE
        return extended, unbegun

    def park(self, rows: np.ndarray) -> None:
        """The turn of these live rows has ended."""
        self._states[rows] = RowState.PARKED

    def extend(self, rows: np.ndarray) -> None:
        """Let parked rows wait. Raises KernelError for others."""
        self._require_parked(rows, "a parked row to extend")
        self._states[rows] = RowState.EXTENDED
        self._extended.extend(np.sort(rows).tolist())

    def drop(self, rows: np.ndarray) -> None:
        """Let rows write never again. Raises KernelError for those that are not parked."""
        self._require_parked(rows, "a parked row to drop")
        self._states[rows] = RowState.DROPPED

    def _require_parked(self, rows: np.ndarray, what: str) -> None:
        wrong = np.flatnonzero(self._states[rows] != RowState.PARKED)
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
