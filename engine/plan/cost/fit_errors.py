"""How far fitted seconds are off for rows like those that were measured.

Owns: what lies between the sizes of a profile. Does not own: the fit
(engine/predict/profile/fitting.py), the file (profile.py).

A few coefficients do not tell all: what no longer fits into a cache, say, is slower. What the fit
left over at the sizes that were measured says how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.plan.cost.profile import ProfileCell

_NEAR = 0.1
"""Squared distance, in doublings, within which a size counts as the same."""


def measured_over_fitted(
    cells: Sequence[ProfileCell], rows: float, prompt: float, answer: float
) -> float:
    """Find the factor by which fitted seconds become those that the nearest sizes took; 1 without
    any. rows, and mean tokens of their prompts and answers.

    The mean of the cells' logarithms, each weighted by its inverse squared distance (Shepard,
    Proc. 23rd ACM National Conference, 1968), in doublings of rows, prompts and answers.
    """
    total = weights = 0.0
    for cell in cells:
        if cell.seconds is None or not cell.fitted:
            continue
        sizes = ((rows, cell.rows), (prompt, cell.prompt), (answer, cell.answer))
        squared_distance = sum(_doublings(*size) ** 2 for size in sizes)
        weight = 1.0 / (_NEAR + squared_distance)
        total += weight * math.log(cell.seconds / cell.fitted)
        weights += weight
    return math.exp(total / weights) if weights else 1.0


def _doublings(size: float, other: float) -> float:
    return math.log2(max(size, 1.0) / max(other, 1.0))
