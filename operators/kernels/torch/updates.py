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
from operators.kernels.torch.minibatches import minibatches
from operators.kernels.torch.parallel import Ranks
from operators.kernels.torch.reduce import MetricSums, Weights, count_weights
from operators.kernels.torch.steprows import TrainRows
from operators.kernels.torch.train_settings import RowSet, TrainSettings


@dataclass(frozen=True, slots=True, eq=False)
class StepSet:
    """The rows of a set in one Step: this rank's, and which of all they are."""

    of: RowSet
    rows: TrainRows
    assigned: AssignedRows


@dataclass(frozen=True, slots=True, eq=False)
class EveryRow:
    """What is known of a set's rows on all ranks: keys, and int64 [rows] trained tokens of each."""

    keys: Keys
    trained: np.ndarray

    @staticmethod
    def of(read: StepSet, ranks: Ranks) -> EveryRow:
        """Asked of all ranks, each of which knows its own rows: 40 bytes a row of the Step in one
        sum. Raises KernelError, on every rank, where they do not have each row once.
        """
        own = read.assigned.keys
        mine = np.stack([own.position, own.sample, own.attempt, read.rows.trained])
        found = ranks.whole(read.assigned.indices, mine, read.assigned.count)
        position, sample, attempt, trained = found
        return EveryRow(Keys.of(position, sample, attempt), trained)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """An update's rows of one set: this rank's (`picked` of the Step's `rows`), their weights."""

    of: RowSet
    rows: TrainRows
    picked: np.ndarray
    weights: Weights


@dataclass(frozen=True, slots=True, eq=False)
class StepUpdate:
    """One update of a Step: its rows, and where metrics go.

    whole: the keys of the update's rows on all ranks.
    """

    parts: tuple[Part, ...]
    whole: Keys
    step: int
    lr: float
    first: bool
    sums: MetricSums

    @property
    def tokens(self) -> int:
        """Trained tokens, on all ranks."""
        return sum(part.weights.tokens for part in self.parts)


def parts_of(
    read: StepSet,
    every: EveryRow,
    settings: TrainSettings,
    *,
    seed: int,
    node: str,
    step: int,
) -> Iterator[tuple[Part, Keys]]:
    """A set's rows in each update, with the keys of those on all ranks."""
    of, mine = read.of, read.assigned.indices
    groups = np.unique(every.keys.position, return_inverse=True)[1]
    drawn = minibatches(
        every.keys.position,
        epochs=settings.epochs,
        count=settings.minibatches,
        seed=seed,
        node=node if of.name == ROWS else f"{node}/{of.name}",
        step=step,
    )
    for minibatch in drawn:
        weights = count_weights(
            every.trained,
            groups,
            minibatch,
            aggregate=settings.aggregate,
            masked_rows=settings.masked_rows,
            constant=of.constant,
        )
        picked = np.flatnonzero(np.isin(mine, minibatch))
        yield Part(of, read.rows, picked, weights.of(mine)), every.keys.take(minibatch)
