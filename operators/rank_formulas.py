"""ListMLE over the rows of a Step, in NumPy, and its tangent, in tensor methods.

Owns: the formulas of rank_losses.py. Does not own: the operators. A function on columns has its
operator's name, which is part of every graph's digest; every graph.json names these functions.
"""

from __future__ import annotations

import numpy as np

from dataflow.loss import Now, Tensors, Terms
from dataflow.schema import RankTerms, Reward
from dataflow.user import Columns
from operators.masked_numbers import absence_error


def ranks(score: Columns[Reward], target: Columns[Reward]) -> Columns[RankTerms]:
    """Of row i: log sum_k exp(s_k) - s_i over the rows k with target y_k <= y_i, which without
    equal targets is ListMLE (Xia et al. 2008, doi 10.1145/1390156.1390306); among equal ones all
    are in each other's sum (Breslow 1974, doi 10.2307/2529620).
    """
    scores = score["reward"].astype(np.float64)
    targets = target["reward"]
    order = np.argsort(targets, kind="stable")
    ascending = scores[order]
    first, last = _find_ties(targets[order])
    sums_so_far = np.logaddexp.accumulate(ascending)
    log_sums = sums_so_far[last]
    # A row is in the sum of every row whose target is not smaller.
    descending_inverses = -log_sums[::-1]
    inverses_so_far = np.logaddexp.accumulate(descending_inverses)
    inverse_sums = inverses_so_far[::-1][first]
    slopes = np.empty_like(scores)
    terms = np.empty_like(scores)
    terms[order] = np.maximum(log_sums - ascending, 0.0)
    slopes[order] = np.exp(ascending + inverse_sums) - 1.0
    return Columns.make(
        RankTerms,
        like=score,
        score=score["reward"],
        term=terms.astype(np.float32),
        slope=slopes.astype(np.float32),
    )


def _find_ties(ascending: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [rows]: of each of some sorted numbers, the places of the first and of the last one
    that equals it.
    """
    first = np.searchsorted(ascending, ascending, side="left")
    last = np.searchsorted(ascending, ascending, side="right") - 1
    return first, last


def rank(now: Now, ranks: Tensors[RankTerms]) -> Terms:
    """term + slope * (score now - score then): the tangent of the sum of all terms."""
    if now.scores is None:
        raise absence_error("rank_loss", "scores", 'Model(..., head="scalar")')
    is_untrained = now.row_sum(now.mask) == 0
    moved = (now.scores - ranks["score"]).masked_fill(is_untrained, 0.0)
    tangent = ranks["term"] + ranks["slope"] * moved
    return Terms(tangent.masked_fill(is_untrained, 0.0))
