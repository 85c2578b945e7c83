"""Rows that were lost alone: a failed episode, whose group goes on without it.

Owns: which rows these are, and what an emptied group is to the error budget. Does not own: their
state in a table, which is ABSENT like that of rows that a select removed (tables.py), nor when a
prompt is dropped (prompt_table.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEFT, GIVEN_UP, FAILED = 0, 1, 2
"""A row that was not lost alone; that a node's own policy gave up; that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptiedGroup:
    """A prompt that is dropped, as its last rows were lost alone. failed: whether one of them
    failed. share: of the prompt, what its failed rows have cost the error budget so far.
    """

    failed: bool
    share: float


class LostRows:
    """The rows of one node that were lost alone: uint8 [slots, rows]."""

    def __init__(self, slots: int, rows: int) -> None:
        self._how = np.zeros((slots, rows), dtype=np.uint8)

    def add(self, slot: int, sample: int, *, failed: bool) -> None:
        """One more."""
        if failed:
            self._how[slot, sample] = FAILED
        else:
            self._how[slot, sample] = GIVEN_UP

    def any_of(self, slots: np.ndarray) -> np.ndarray:
        """Boolean [slots]: the prompts that lost a row alone."""
        return (self._how[slots] != LEFT).any(axis=1)

    def failed_share(self, slot: int) -> float:
        """The share of a prompt's rows that failed alone."""
        return float((self._how[slot] == FAILED).mean())

    def clear(self, slots: np.ndarray) -> None:
        """Forget these prompts."""
        self._how[slots] = LEFT

    def grow(self, slots: int) -> None:
        """Room for this many slots."""
        self._how = lengthen(self._how, slots)


def lengthen(old: np.ndarray, rows: int) -> np.ndarray:
    """The same array with so many rows, the new ones 0."""
    new = np.zeros((rows, *old.shape[1:]), dtype=old.dtype)
    new[: len(old)] = old
    return new
