"""mean_over: which rows are waited for, which are left, and their mean, against plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dataflow.batch import Batch, Keys
from dataflow.kernel import Chunk, KernelNode, Layout
from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.prompts import DROPPED, FINISHED, REJECTED
from engine.coordinator.reduced_rows import find_descendants
from engine.coordinator.tables import PRESENT, RowTable, StepRows
from engine.run.worker.kernel_session import NodeSession
from operators.kernels.mean_over import MeanOver
from tests.kit.plans import planned_input, planned_node, ref
from tests.kit.turns import example_count

FLOATS = st.floats(-1e3, 1e3, width=32)
Rows = dict[tuple[int, int, int], list[float | None]]
"""Key of a row -> the rewards of its descendants that are left."""


def keys_of(rows: Sequence[tuple[int, int, int]]) -> Keys:
    return Keys.of(*zip(*rows, strict=True)) if rows else Keys.of([])


def mean_over(
    keys: Keys, below: Sequence[tuple[int, int, int]], rewards: list[float | None]
) -> tuple[Batch, NodeSession]:
    """What the kernel makes of rewards, each of a row below the one with this key."""
    session, kernel = NodeSession("mean", 0, {}, {}), MeanOver()
    kernel.open(KernelNode(name="mean", operator="mean_over"), Layout(), session)
    column = pa.RecordBatch.from_arrays([pa.array(rewards, pa.float32())], names=["reward"])
    inputs = {"reward": Batch(keys_of(below), column)}
    (batch,) = kernel.run(Chunk(id=0, step=0, keys=keys, inputs=inputs))
    return batch, session


KEYS = st.tuples(st.integers(0, 2**40), st.integers(0, 40), st.just(0))


@given(st.dictionaries(KEYS, st.lists(st.none() | FLOATS, max_size=5), max_size=6))
@settings(max_examples=example_count(60))
def test_means_are_those_of_a_plain_loop(rows: Rows) -> None:
    keys = sorted(rows)
    below = [key for key in keys for _ in rows[key]]
    batch, session = mean_over(keys_of(keys), below, [v for key in keys for v in rows[key]])
    means = dict(zip(batch.keys.rows(), batch.flat("reward").tolist(), strict=True))
    tombstones = [row.key for row in session.tombstones()]
    left = {key: [v for v in values if v is not None] for key, values in rows.items()}
    assert tombstones == sorted(key for key, values in left.items() if not values)
    assert means.keys() == {key for key, values in left.items() if values}
    for key, mean in means.items():
        exact = sum(map(Fraction, left[key]), Fraction(0)) / len(left[key])
        assert mean == pytest.approx(float(exact), rel=1e-6, abs=1e-6)


def test_a_row_without_any_says_why() -> None:
    _, session = mean_over(Keys.of([3], [1], [2]), [], [])
    (row,) = session.tombstones()
    assert (row.key, row.failed, row.row_only) == ((3, 1, 2), True, False)
    assert (
        row.error == "no remaining row made from it has a reward. Fix: let select keep more rows."
    )


@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=example_count(60))
def test_descendants_are_those_of_a_plain_loop(
    data: st.DataObject, slots: int, width: int, fan_in: int
) -> None:
    """Above the cut by the tables, below it by keys: the same rows, in the order of their keys."""
    table = RowTable(width * fan_in, slots)
    table.state[:] = data.draw(arrays(np.uint8, table.state.shape, elements=st.integers(0, 2)))
    at, samples = np.nonzero(data.draw(arrays(np.bool_, (slots, width))))
    owner, below = find_descendants(table, fan_in, at, samples)
    below_each = list(zip(at[owner].tolist(), samples[owner].tolist(), below.tolist(), strict=True))
    assert below_each == [
        (slot, sample, low)
        for slot, sample in zip(at.tolist(), samples.tolist(), strict=True)
        for low in range(width * fan_in)
        if low // fan_in == sample and table.state[slot, low] == PRESENT
    ]
    present = Keys.of(*np.nonzero(table.state == PRESENT))
    nowhere = np.zeros(len(present), np.int64)
    rows = StepRows(present, nowhere, nowhere.astype(np.int32))
    descending, owners = rows.below(Keys.of(at, samples), fan_in)
    places = zip(descending.position, owners.sample, descending.sample, strict=True)
    assert list(places) == below_each


def prompt_table(*, refill: bool = False, chunking: str = "cohort") -> PromptTable:
    """prompts -> rollout x2 -> later x2 -> left (a select) -> mean, over the rows of rollout."""

    def node(name: str, relation: str, rows: int, inner: int, *inputs: Any, **more: Any) -> Any:
        shape = {"relation": relation, "rows": rows, "inner": inner, "chunking": chunking}
        return planned_node(name, *inputs, **shape | more)

    rewards = planned_input("left", "later", fan_in=2)
    nodes = (
        node("prompts", "source", 1, 1, work="source"),
        node("rollout", "expand", 2, 1, "prompts"),
        node("later", "expand", 4, 2, "rollout"),
        node("left", "subset", 4, 4, "later", refill=refill, work="select"),
        node("mean", "reduce", 2, 2, rewards, planned_input("rollout")),
    )
    return PromptTable("prompts", nodes, ("mean",), Blocks())


def produced(table: PromptTable, node: str, *rows: tuple[int, int]) -> None:
    table.add_rows(node, ref(Keys.of(*zip(*rows, strict=True)), block=0, version=0))


def begin(table: PromptTable, prompts: int = 1, *, later: bool = True) -> None:
    """All rows of the generations are there; or of the first one alone."""
    table.admit(range(prompts), [0] * prompts, 0)
    for node, width in (("prompts", 1), ("rollout", 2), *([("later", 4)] if later else [])):
        produced(table, node, *((p, s) for p in range(prompts) for s in range(width)))
        table.pump()


def select(table: PromptTable, *kept: tuple[int, int], prompt: int = 0) -> None:
    """The selection has decided on a prompt: it keeps these rows."""
    if kept:
        produced(table, "left", *kept)
    table.close_chunk(NodeChunk(table.nodes[3], Keys.of([prompt] * 4, range(4)), {}))


def only(chunks: list[NodeChunk]) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """The rows of the one chunk that is ready; for each descendant, the row it belongs to."""
    (ready,) = chunks
    (reading,) = ready.inputs["left"]
    return ready.keys.rows(), reading.keys.rows()


BOTH = [(0, 0, 0), (0, 1, 0)]


@pytest.mark.parametrize("chunking", ["cohort", "ready"])
def test_a_row_waits_for_all_of_its_own_and_reads_those_that_are_left(chunking: str) -> None:
    table = prompt_table(chunking=chunking)
    begin(table)
    produced(table, "left", (0, 0), (0, 3))
    assert table.pump() == [], "rows 1 and 2 of turn 2 may still come"
    select(table)
    assert only(table.pump()) == (BOTH, BOTH)


def test_a_row_of_which_nothing_is_left_is_in_the_chunk() -> None:
    table = prompt_table()
    begin(table)
    select(table, (0, 2), (0, 3))
    # Its kernel tombstones the first.
    assert only(table.pump()) == (BOTH, [(0, 1, 0), (0, 1, 0)])


def test_what_a_refilling_select_rejects_is_no_tombstone() -> None:
    table = prompt_table(refill=True)
    begin(table)
    select(table)
    assert table.pump() == []
    assert len(table.prompts.slots(REJECTED)) == 1


def test_a_prompt_that_was_given_up_above_fails_no_second_time() -> None:
    table = prompt_table(chunking="ready")
    begin(table, 2, later=False)
    produced(table, "later", (0, 0), (1, 0), (1, 1), (1, 2), (1, 3))
    table.drop("later", 0, 0)
    table.pump()
    select(table, (1, 1), (1, 2), prompt=1)
    assert only(table.pump()) == ([(1, 0, 0), (1, 1, 0)], [(1, 0, 0), (1, 1, 0)])
    assert len(table.prompts.slots(DROPPED)) == 1
    produced(table, "mean", (1, 0), (1, 1))
    table.pump()
    assert len(table.prompts.slots(FINISHED)) == 1
