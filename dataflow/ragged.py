"""Ragged: the values of a column's rows, one after another, and where each row begins.

Owns: the view. Does not own: Arrow's lists (batch.py), rows of tensors (device.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.arrays import steps_between


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """A list column as views: row i is `values[offsets[i]:offsets[i + 1]]`. Read-only memory.

    values: NumPy; for a column declared `device` a torch tensor on its device. offsets are always
    NumPy.
    """

    values: Any
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]."""
        return steps_between(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Any:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def segments(self) -> np.ndarray:
        """int64 [values]: the row that each value belongs to."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def like(self, values: Any) -> Ragged:
        """New values on the same offsets."""
        return Ragged(values, self.offsets)
