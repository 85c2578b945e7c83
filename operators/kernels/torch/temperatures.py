"""Temperatures: that of each row, which its sample number tells.

Owns: one temperature for all rows, or one for each of a prompt's samples, as rows of a concat of
generations have. Does not own: which temperature that is (engine/plan/passes/resolve.py), logits
(heads.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NodeTemperature = float | tuple[float, ...] | None
"""A node's parameter: one for all rows, or one for each of a prompt's samples; None is 1."""

Temperature = float | np.ndarray
"""One for all tokens, or float32 [tokens]."""


@dataclass(frozen=True, slots=True, eq=False)
class Temperatures:
    """by_sample: float64 [1] for all rows, or [samples of a prompt]; 1 in the place of 0."""

    by_sample: np.ndarray

    @staticmethod
    def of(parameter: NodeTemperature) -> Temperatures:
        """Read the node's parameter."""
        if parameter is None:
            parameter = 1.0
        by_sample = np.atleast_1d(np.array(parameter, dtype=np.float64))
        # Greedy rows, too, are read at temperature 1: logits divided by 0 say nothing.
        return Temperatures(np.where(by_sample == 0.0, 1.0, by_sample))

    def of_tokens(self, sample: np.ndarray, row: np.ndarray) -> Temperature:
        """Find the temperature of each token: one number if all have the same.

        row: the row of each token, an index into `sample`, which has the rows' key.sample.
        """
        if not len(sample):
            return float(self.by_sample[0])
        by_row = expand_to_rows(self.by_sample, sample)
        if not len(row) or (by_row == by_row[0]).all():
            return float(by_row[0])
        return by_row[row].astype(np.float32)

    def equal(self, recorded: NodeTemperature) -> np.ndarray:
        """Compare with those of recorded log-probs: boolean, [1] or [samples].

        None: they were recorded at these.
        """
        if recorded is None:
            return np.ones(1, dtype=bool)
        return self.by_sample == np.array(recorded, dtype=np.float64)


def expand_to_rows(by_sample: np.ndarray, sample: np.ndarray) -> np.ndarray:
    """Look each row up by its sample: [rows], from [1] for all or [samples of a prompt].

    sample: key.sample of each row.
    """
    if len(by_sample) == 1:
        return np.broadcast_to(by_sample, len(sample))
    return by_sample[sample]
