"""Tokens of the rows that a node computes, of which its seconds are.

Owns: the numbers of some rows. Does not own: where they come from (engine/plan/lengths.py, a
simulation's draws).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class RowLengths:
    """Tokens of each row's prompt and answer, int64 [rows]."""

    prompts: np.ndarray
    answers: np.ndarray

    def __len__(self) -> int:
        return len(self.answers)

    @staticmethod
    def of_none() -> RowLengths:
        """No row."""
        return RowLengths(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    def take(self, rows: np.ndarray) -> RowLengths:
        """Pick some rows, by number or by a mask."""
        return RowLengths(self.prompts[rows], self.answers[rows])
