"""Questions to NumPy arrays that are asked at each event, without NumPy's own price for a call.

Owns: these questions. Does not own: what the arrays hold.
"""

from __future__ import annotations

import numpy as np


def same_array(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one dimension are equal. NaN equals nothing, as in `==`.

    Of a few hundred numbers this takes a quarter of the time of `np.array_equal`.
    """
    return a is b or (len(a) == len(b) and 0 not in (a == b).tobytes())


def any_true(mask: np.ndarray) -> bool:
    """`mask.any()` of booleans, in a third of its time."""
    return bool(np.count_nonzero(mask))


def all_true(mask: np.ndarray) -> bool:
    """`mask.all()` of booleans, in a third of its time."""
    return bool(np.count_nonzero(mask) == mask.size)


def steps_between(ascending: np.ndarray) -> np.ndarray:
    """Each number less the one before, [n - 1]: `np.diff` in a quarter of its time."""
    return ascending[1:] - ascending[:-1]
