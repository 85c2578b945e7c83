"""What makes a Weight and a length, in NumPy.

Owns: the formulas of row_weights.py. Does not own: the operators. A function on columns has its
operator's name, which is part of every graph's digest.
"""

from __future__ import annotations

import numpy as np

from dataflow.schema import Reward, Rollout, Weight
from dataflow.user import Columns


def weight_of(score: Columns[Reward]) -> Columns[Weight]:
    """The number as it is."""
    return Columns.make(Weight, like=score, weight=score["reward"])


def answer_length(rollout: Columns[Rollout], *, log: bool = True) -> Columns[Reward]:
    """The sum of each row's mask, or log(1 + that)."""
    mask = rollout["completion_mask"]
    row = mask.segments()
    lengths = np.bincount(row, weights=mask.values, minlength=len(rollout))
    numbers = np.log1p(lengths) if log else lengths
    return Columns.make(Reward, like=rollout, reward=numbers.astype(np.float32))
