"""Which finished rows become the batch of a Step.

Owns: the three policies, as pure functions of ages. Does not own: which prompts are
finished (prompt_table.py), nor the bound on outstanding prompts (admission.py).

A group's age is the version that its oldest token was made with (`begun`). The bound: a
group trained at Step t has lag (t - 1) - begun <= max_lag.
"""

from __future__ import annotations

import numpy as np

from dataflow.arrays import all_true


def choose_exact(
    begun: np.ndarray, running: np.ndarray, *, batch: int, max_lag: int, version: int, last: bool
) -> np.ndarray:
    """Indices into `begun` (finished groups, in admission order) to train now; none means wait.

    Takes the oldest `batch`, and only if afterwards, for every s, untrained(begun <= s) <= batch *
    (s + max_lag - version): what stays can still be trained in time. A negative bound allows none.
    running: lower bounds of the ages of unfinished groups. last: nothing else is on its way or to
    come, so a short batch is taken as it is.
    """
    if len(begun) < batch and not last:
        return np.zeros(0, dtype=np.int64)
    taken = np.lexsort((np.arange(len(begun)), begun))[:batch]
    stays = np.ones(len(begun), dtype=bool)
    stays[taken] = False
    untrained = np.concatenate([begun[stays], running])
    if is_in_time(untrained, batch=batch, max_lag=max_lag, version=version):
        return np.sort(taken)
    return np.zeros(0, dtype=np.int64)


def is_in_time(untrained: np.ndarray, *, batch: int, max_lag: int, version: int) -> bool:
    """Whether groups of these ages can still be trained in time, once a Step is formed without
    them: for every s, untrained(begun <= s) <= batch * (s + max_lag - version).
    """
    ages = np.sort(untrained)
    allowed = batch * (ages.astype(np.int64) + max_lag - version)
    # Sorted, the i-th entry stands for s = its age; of equal ages the last one counts them all.
    counted = np.searchsorted(ages, ages, side="right")
    return all_true(counted <= allowed)


def choose_oldest(begun: np.ndarray, *, batch: int, last: bool) -> np.ndarray:
    """The oldest finished groups by admission, of any age (arXiv:2505.24298, equation 3).
    last: nothing else is on its way or to come, so a short batch is taken as it is.
    """
    if len(begun) < batch and not last:
        return np.zeros(0, dtype=np.int64)
    return np.arange(min(batch, len(begun)))


def find_too_old(begun: np.ndarray, *, max_lag: int, version: int) -> np.ndarray:
    """Boolean: groups that the `drop` policy gives up and submits again."""
    return version - begun > max_lag
