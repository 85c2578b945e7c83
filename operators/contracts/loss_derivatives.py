"""The derivatives of a loss's terms on generated rows: by backward, and by differences.

Owns: of which sum of the terms they are, and where they are taken. Does not own: comparing them
(losses.py), differences (numeric_gradients.py), the terms (numbers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from operators.contracts.cases import Generated
from operators.contracts.numbers import Options, compute_terms, make_leaves, make_weights
from operators.contracts.numeric_gradients import Slope, measure_slopes
from operators.contracts.subject import LossSubject


def gradients_of_rows(
    subject: LossSubject, rows: Generated, unit: Sequence[int]
) -> dict[str, list[np.ndarray]]:
    """The gradient of these rows' terms by all of the model's numbers."""
    leaves = make_leaves(rows)
    terms = compute_terms(subject, rows, range(len(rows)), leaves=leaves)
    weights = make_weights(subject, rows, lambda row: row in unit)
    sum_terms(terms, weights).backward()
    ends = np.cumsum([0, *map(len, rows.masks)])
    gradients: dict[str, list[np.ndarray]] = {}
    for name, leaf in leaves.items():
        if leaf.grad is None:
            gradient = np.zeros(leaf.shape)
        else:
            gradient = leaf.grad.numpy()
        cuts = range(len(rows) + 1) if name == "scores" else ends
        gradients[name] = [gradient[start:stop] for start, stop in pairwise(cuts)]
    return gradients


def measure_loss_slopes(subject: LossSubject, rows: Generated, away: float) -> list[Slope]:
    """Measure the derivatives of the weighted sum of all terms by each of the model's numbers.
    away: how far these are moved first.
    """
    leaves = make_leaves(rows, double=True)
    with torch.no_grad():
        for leaf in leaves.values():
            flat = leaf.view(-1)
            # By a different distance each, so that equal numbers part.
            flat += away * torch.sin(torch.arange(1.0, len(flat) + 1.0, dtype=torch.float64))
    weights = make_weights(subject, rows)

    def compute_total(moved: dict[str, Tensor]) -> Tensor:
        options = Options(double=True)
        terms = compute_terms(subject, rows, range(len(rows)), leaves=moved, options=options)
        return sum_terms(terms, weights)

    return list(measure_slopes(compute_total, leaves))


def sum_terms(terms: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The weighted sum. As in `reduce_term` what does not count is left out, not multiplied by 0:
    0 * nan is nan.
    """
    total = torch.zeros((), dtype=torch.float64)
    for term, weight in zip(terms, weights, strict=True):
        counted = term.double().masked_fill(weight == 0, 0.0)
        total = total + (counted * weight).sum()
    return total
