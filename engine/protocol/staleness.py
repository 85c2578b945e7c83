"""The staleness of rows: which version they count as, and a Step's lag, which follows from it.

Owns: which versions count, and for how long; the metrics. Does not own: the bound on lag
(coordinator/intake.py), nor what a token's own version is (the kernel records it).

Lag is counted over what changes during a run: tokens of a trained Model and of its followers. Rows
that a frozen Model (a judge) made are as new as those that they were made of. A follower that moves
every k Steps is the same between its moves: what it made with version v is as new as v + k - 1.
"""

from __future__ import annotations

import numpy as np

from dataflow.arrays import any_true
from engine.plan.plan import Plan

NO_VERSION = -1
"""The version of rows that no trained Model has made."""


def ages(plan: Plan, node: str, oldest: np.ndarray) -> np.ndarray:
    """int32 [rows]: the version that rows of a node count as. oldest: the kernel's record of their
    tokens.
    """
    lasting = _count_lasting(plan, node)
    if lasting is None:
        return np.full(len(oldest), NO_VERSION, dtype=np.int32)
    return np.where(oldest == NO_VERSION, NO_VERSION, oldest + lasting).astype(np.int32)


def lag_metrics(version: int, ages: np.ndarray) -> dict[str, float]:
    """The lag of a Step that starts from this version. A follower's rows may count as newer than
    that: their lag is 0.
    """
    lag = np.maximum(version - ages, 0)
    if not any_true(lag != 0):  # as all of a synchronous run
        return {"policy/lag/mean": 0.0, "policy/lag/max": 0.0}
    return {"policy/lag/mean": float(lag.mean()), "policy/lag/max": float(lag.max())}


def _count_lasting(plan: Plan, node: str) -> int | None:
    """How many further versions the Models that the node reads stay; None if none changes."""
    uses = [use for use in plan.node(node).models if use.trained and use.param != "tokenizer"]
    read_models = {use.model for use in uses}
    lasting: list[int] = []
    for model in plan.models:
        if model.name in read_models:
            lasting.append(model.every - 1 if model.follows else 0)
    return min(lasting, default=None)
