"""What ranks ask each other before a Step's first forward gives each update the rows and weights of
one rank that has all rows, to the bit.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataflow.batch import Keys
from dataflow.errors import KernelError
from dataflow.kernel import AssignedRows
from operators.kernels.torch.parallel import Ranks
from operators.kernels.torch.reduce import AGGREGATES, Weights
from operators.kernels.torch.steprows import _no_rows
from operators.kernels.torch.train_settings import RowSet, TrainSettings
from operators.kernels.torch.updates import EveryRow, Part, StepSet, draw_parts
from tests.kit.kernels import FakeSession
from tests.kit.training import PG
from tests.kit.turns import example_count


class SharedSums:
    """Where ranks that are threads put what is summed."""

    def __init__(self, world: int) -> None:
        self.given: list[Tensor] = [torch.zeros(0)] * world
        self.all_here = Barrier(world, timeout=30.0)


class ThreadRanks(Ranks):
    """Ranks of which each is a thread; they only sum numbers."""

    def __init__(self, table: SharedSums, rank: int, tensor: int) -> None:
        self.rank, self.world = rank, len(table.given)
        self.tensor = self.alike = tensor
        self._node, self._table = "train_policy", table

    def _sum(self, tensor: Tensor) -> Tensor:
        self._table.given[self.rank] = tensor
        self._table.all_here.wait()
        total = torch.stack(self._table.given).sum(dim=0)
        self._table.all_here.wait()
        return total


def step_set(keys: Keys, trained: np.ndarray, own: AssignedRows) -> StepSet:
    """A row set of which a rank has some rows."""
    of = RowSet(name="rows", loss=PG, minibatches=2, max_tokens=7, step_rows=12)
    return StepSet(of, replace(_no_rows(), keys=keys, trained=trained), own)


def parts(
    read: StepSet, ranks: Ranks, how: TrainSettings
) -> tuple[list[tuple[Part, Keys]], EveryRow]:
    every = EveryRow.of(read, ranks)
    return list(draw_parts(read, every, how, seed=5, node="train_policy", step=3)), every


@settings(max_examples=example_count(60))
@given(
    owners=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    n=st.integers(1, 3),
    tensor=st.integers(1, 2),
    aggregate=st.sampled_from(AGGREGATES),
    masked_rows=st.sampled_from(["skip", "count"]),
    minibatches=st.integers(1, 3),
    data=st.data(),
)
def test_ranks_have_the_minibatches_and_weights_of_one(
    owners: list[int],
    n: int,
    tensor: int,
    aggregate: str,
    masked_rows: str,
    minibatches: int,
    data: st.DataObject,
) -> None:
    first = data.draw(st.sampled_from([0, 1 << 33, (1 << 62) // 3]))
    keys = Keys.of(range(first, first + len(owners)), None, owners).expand(n)
    trained = np.array([data.draw(st.integers(0, 9)) for _ in range(len(keys))])
    how = TrainSettings(
        loss=PG, lr=1.0, aggregate=aggregate, masked_rows=masked_rows, epochs=2,
        minibatches=minibatches,
    )  # fmt: skip
    alone = Ranks(FakeSession(), torch.device("cpu"), "train_policy")
    expected, _ = parts(step_set(keys, trained, AssignedRows(keys=keys)), alone, how)

    shares = [np.flatnonzero(np.repeat(owners, n) == share) for share in range(3)]
    table = SharedSums(3 * tensor)

    def one(rank: int) -> tuple[list[tuple[Part, Keys]], EveryRow]:
        mine = shares[rank // tensor]
        assigned = AssignedRows(keys=keys.take(mine), mine=mine, total=len(keys))
        read = step_set(assigned.keys, trained[mine], assigned)
        return parts(read, ThreadRanks(table, rank, tensor), how)

    with ThreadPoolExecutor(table.all_here.parties) as threads:
        by_rank = list(threads.map(one, range(table.all_here.parties)))
    for rank, (each, every) in enumerate(by_rank):
        mine = shares[rank // tensor]
        assert every.keys.rows() == keys.rows()
        kinds = [(k.position.dtype, k.sample.dtype, k.attempt.dtype) for k in (every.keys, keys)]
        assert kinds[0] == kinds[1]
        for (part, whole), (one_part, one_whole) in zip(each, expected, strict=True):
            assert whole.rows() == one_whole.rows()
            assert mine[part.picked].tolist() == np.intersect1d(mine, one_part.picked).tolist()
            require_same(part.weights, one_part.weights.of(mine))


def require_same(found: Weights, wanted: Weights) -> None:
    """Equal to the bit."""
    assert (found.group, found.tokens) == (wanted.group, wanted.tokens)
    for name in ("token", "row", "live"):
        assert getattr(found, name).tobytes() == getattr(wanted, name).tobytes()


def test_rows_that_no_rank_has_are_an_error_on_each() -> None:
    table, keys = SharedSums(2), Keys.of(range(4))

    def one(rank: int) -> str:
        mine = np.array([[0, 1], [3]][rank])
        own = AssignedRows(keys=keys.take(mine), mine=mine, total=4)
        try:
            EveryRow.of(step_set(own.keys, mine, own), ThreadRanks(table, rank, 1))
        except KernelError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(one, range(2)))
    assert said[0] == said[1]
    assert "expected each of 4 rows with exactly one of 2 ranks, found row 2 with 0" in said[0]
