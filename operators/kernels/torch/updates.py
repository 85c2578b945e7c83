"""The updates of a Step: which rows of each row set make each of them, and what they weigh.

Owns: one set's minibatches and their denominators, each counted over that set alone, and what ranks
ask each other for that. Does not own: how a minibatch is drawn (minibatches.py), what a denominator
is (reduce.py), the update (train.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dataflow.batch import Keys
from dataflow.kernel import AssignedRows
from dataflow.loss_terms import ROWS
from operators.kernels.torch.minibatches import draw_minibatches
from operators.kernels.torch.parallel import Ranks
from operators.kernels.torch.reduce import (
    UNDIVIDED,
    MetricSums,
    Weights,
    count_weights,
    weigh_rows,
)
from operators.kernels.torch.steprows import TrainRows
from operators.kernels.torch.train_settings import RowSet, TrainSettings


@dataclass(frozen=True, slots=True, eq=False)
class StepSet:
    """The rows of a set in one Step: this rank's, and which of all they are."""

    row_set: RowSet
    rows: TrainRows
    assigned: AssignedRows


@dataclass(frozen=True, slots=True, eq=False)
class EveryRow:
    """A set's rows on all ranks: their keys, and int64 [rows] trained tokens of each."""

    keys: Keys
    trained: np.ndarray

    @staticmethod
    def of(read: StepSet, ranks: Ranks) -> EveryRow:
        """Ask all ranks, each of which knows its own rows: 40 bytes a row of the Step in one sum
        (docs/decisions/0038-a-rank-is-told-its-own-rows.md). Raises KernelError, on every rank,
        where they do not have each row once.
        """
        assigned = read.assigned
        keys = assigned.keys
        numbers = np.stack([keys.position, keys.sample, keys.attempt, read.rows.trained])
        table = ranks.whole(assigned.indices, numbers, assigned.count)
        position, sample, attempt, trained = table
        return EveryRow(Keys.of(position, sample, attempt), trained)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """An update's rows of one set: this rank's (`picked` of the Step's `rows`), their weights."""

    row_set: RowSet
    rows: TrainRows
    picked: np.ndarray
    weights: Weights


@dataclass(frozen=True, slots=True, eq=False)
class StepUpdate:
    """One update of a Step, or a part of one: its rows, and where metrics go.

    keys: those of the update's rows on all ranks; of a part, on this one. first: whether no update
    of the Step was made before it. losses: where the number of each term is added up, if not with
    the metrics: not divided, of a part.
    """

    parts: tuple[Part, ...]
    keys: Keys
    step: int
    lr: float
    first: bool
    sums: MetricSums
    losses: MetricSums

    @property
    def tokens(self) -> int:
        """Trained tokens, on all ranks."""
        return sum(part.weights.tokens for part in self.parts)


def weigh_part(read: StepSet, settings: TrainSettings) -> Part:
    """Weigh this rank's rows of a part of a Step, not divided by what only the whole Step knows."""
    row_set, trained = read.row_set, read.rows.trained
    weights = weigh_rows(
        trained,
        np.ones(len(trained), dtype=bool),
        UNDIVIDED,
        aggregate=settings.aggregate,
        constant=row_set.constant,
    )
    return Part(row_set, read.rows, np.arange(len(trained)), weights)


def draw_parts(
    read: StepSet,
    every: EveryRow,
    settings: TrainSettings,
    *,
    seed: int,
    node: str,
    step: int,
) -> Iterator[tuple[Part, Keys]]:
    """Draw a set's rows of each update, with the keys of those on all ranks."""
    row_set = read.row_set
    own_indices = read.assigned.indices
    groups = np.unique(every.keys.position, return_inverse=True)[1]
    stream = node
    if row_set.name != ROWS:
        stream = f"{node}/{row_set.name}"  # sets are drawn apart from each other
    index_sets = draw_minibatches(
        every.keys.position,
        epochs=settings.epochs,
        count=settings.minibatches,
        seed=seed,
        node=stream,
        step=step,
    )
    for minibatch in index_sets:
        # Counted over all ranks' rows, so that no rank's share changes a weight.
        weights = count_weights(
            every.trained,
            groups,
            minibatch,
            aggregate=settings.aggregate,
            masked_rows=settings.masked_rows,
            constant=row_set.constant,
        )
        picked = np.flatnonzero(np.isin(own_indices, minibatch))
        part = Part(row_set, read.rows, picked, weights.of(own_indices))
        yield part, every.keys.take(minibatch)
