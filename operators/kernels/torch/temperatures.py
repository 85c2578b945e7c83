"""Temperatures: that of each row, which its sample number tells.

Owns: one temperature for all rows, or one for each of a prompt's samples, as rows of a concat of
generations have. Does not own: which temperature that is (engine/plan/passes/resolve.py), logits
(heads.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Given = float | tuple[float, ...] | None
"""A node's parameter: one for all rows, or one for each of a prompt's samples; None is 1."""

Temperature = float | np.ndarray
"""One for all tokens, or float32 [tokens]."""


@dataclass(frozen=True, slots=True, eq=False)
class Temperatures:
    """by_sample: float64 [1] for all rows, or [samples of a prompt]; 1 in the place of 0."""

    by_sample: np.ndarray

    @staticmethod
    def of(given: Given) -> Temperatures:
        """From the node's parameter."""
        found = np.atleast_1d(np.array(1.0 if given is None else given, dtype=np.float64))
        return Temperatures(np.where(found == 0.0, 1.0, found))

    def of_tokens(self, sample: np.ndarray, row: np.ndarray) -> Temperature:
        """Of tokens, each of a row (an index into `sample`, the rows' key.sample): one number if
        they have the same.
        """
        found = of_rows(self.by_sample, sample)
        if not len(row) or (found == found[0]).all():
            return float(found[0]) if len(found) else float(self.by_sample[0])
        return found[row].astype(np.float32)

    def equal(self, recorded: Given) -> np.ndarray:
        """Boolean, [1] or [samples]: whether recorded log-probs are at these, too (None: they
        are).
        """
        if recorded is None:
            return np.ones(1, dtype=bool)
        return self.by_sample == np.array(recorded, dtype=np.float64)


def of_rows(by_sample: np.ndarray, sample: np.ndarray) -> np.ndarray:
    """[rows], from [1] for all or [samples of a prompt]. sample: of the rows' keys."""
    if len(by_sample) == 1:
        return np.broadcast_to(by_sample, len(sample))
    return by_sample[sample]
