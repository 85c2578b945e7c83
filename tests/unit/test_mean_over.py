"""mean_over: which rows are waited for, which are left, and their mean, against plain loops."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.kernel import Chunk, KernelNode, Layout
from engine.coordinator.blocks import Blocks
from engine.coordinator.messages import RunChunk
from engine.coordinator.prompt_table import DROPPED, FINISHED, REJECTED, PromptTable, Ready
from engine.coordinator.reduced import descendants
from engine.coordinator.refs import Ref
from engine.coordinator.tables import PRESENT, RowTable, StepRows
from engine.launch.wire import decode, encode
from engine.plan.plan import Fetch, PlannedInput, PlannedNode
from engine.worker.session import Modules, NodeSession
from operators.kernels.mean_over import MeanOver

FLOATS = st.floats(-1e3, 1e3, width=32)
Rows = dict[tuple[int, int, int], list[float | None]]
"""Key of a row -> the rewards of its descendants that are left."""


def kernel() -> tuple[MeanOver, NodeSession]:
    session, made = NodeSession("mean", 0, Modules(), {}), MeanOver()
    made.open(KernelNode(name="mean", operator="mean_over"), Layout(), session)
    return made, session


def ran(rows: Rows) -> tuple[dict[tuple[int, int, int], float], list[tuple[int, int, int]]]:
    """Means by key, and the keys of tombstones."""
    keys = Keys.of(*zip(*sorted(rows), strict=True)) if rows else Keys.of([])
    owners = [key for key in sorted(rows) for _ in rows[key]]
    values = [value for key in sorted(rows) for value in rows[key]]
    below = Keys.of(*zip(*owners, strict=True)) if owners else Keys.of([])
    batch = Batch(
        below, pa.RecordBatch.from_arrays([pa.array(values, pa.float32())], names=["reward"])
    )
    made, session = kernel()
    (found,) = made.run(Chunk(id=0, step=0, keys=keys, inputs={"reward": batch}))
    means = dict(zip(found.keys.rows(), found.flat("reward").tolist(), strict=True))
    return means, [key for key, _, _ in session.tombstones()]


KEYS = st.tuples(st.integers(0, 2**40), st.integers(0, 40), st.just(0))


@given(st.dictionaries(KEYS, st.lists(st.none() | FLOATS, max_size=5), max_size=6))
@settings(max_examples=60, deadline=None)
def test_means_are_those_of_a_plain_loop(rows: Rows) -> None:
    means, tombstones = ran(rows)
    left = {key: [v for v in values if v is not None] for key, values in rows.items()}
    assert tombstones == sorted(key for key, values in left.items() if not values)
    assert means.keys() == {key for key, values in left.items() if values}
    for key, mean in means.items():
        exact = sum(map(Fraction, left[key]), Fraction(0)) / len(left[key])
        assert mean == pytest.approx(float(exact), rel=1e-6, abs=1e-6)


def test_a_row_without_any_says_why() -> None:
    made, session = kernel()
    nothing = Batch(
        Keys.of([]), pa.RecordBatch.from_arrays([pa.array([], pa.float32())], names=["reward"])
    )
    list(made.run(Chunk(id=0, step=0, keys=Keys.of([3], [1], [2]), inputs={"reward": nothing})))
    ((key, error, failed),) = session.tombstones()
    assert (key, failed) == ((3, 1, 2), True)
    assert error == "no row made of it is left that has a reward. Fix: select fewer rows away."


@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_descendants_are_those_of_a_plain_loop(
    data: st.DataObject, slots: int, width: int, fan_in: int
) -> None:
    """Above the cut by the tables, below it by keys: the same rows, in the order of their keys."""
    table = RowTable(width * fan_in, slots)
    states = data.draw(
        st.lists(st.sampled_from([0, 1, 2]), min_size=table.state.size, max_size=table.state.size)
    )
    table.state[:] = np.array(states, dtype=np.uint8).reshape(table.state.shape)
    wanted = data.draw(st.lists(st.booleans(), min_size=slots * width, max_size=slots * width))
    at, samples = np.nonzero(np.array(wanted).reshape(slots, width))
    owner, below = descendants(table, fan_in, at, samples)
    found = list(zip(at[owner].tolist(), samples[owner].tolist(), below.tolist(), strict=True))
    assert found == [
        (slot, sample, low)
        for slot, sample in zip(at.tolist(), samples.tolist(), strict=True)
        for low in range(width * fan_in)
        if low // fan_in == sample and table.state[slot, low] == PRESENT
    ]
    there, which = np.nonzero(table.state == PRESENT)
    rows = StepRows(
        Keys.of(there, which), np.zeros(len(there), np.int64), np.zeros(len(there), np.int32)
    )
    own, owners = rows.below(Keys.of(at, samples), fan_in)
    assert list(zip(own.position, owners.sample, own.sample, strict=True)) == found


# --- a lane with two generations ------------------------------------------------------------------


def lane(*, refill: bool = False, chunking: str = "cohort") -> PromptTable:
    """prompts -> rollout x2 -> later x2 -> left (a select) -> mean, over the rows of rollout."""

    def node(
        name: str, relation: str, rows: int, inner: int, *inputs: PlannedInput, **more: object
    ) -> PlannedNode:
        fields = {
            "operator": name,
            "work": "host",
            "scope": "row",
            "region": "stream",
            "source": "prompts",
        }
        return PlannedNode(
            name=name,
            relation=relation,
            rows=rows,
            inner=inner,
            inputs=inputs,
            chunking=chunking,
            **fields | more,
        )

    def read(gate: str, holder: str = "", fan_in: int = 0) -> PlannedInput:
        fetches = (Fetch(producer=holder, columns=("x",)),) if holder else ()
        return PlannedInput(name=gate, gate=gate, fetches=fetches, fan_in=fan_in)

    nodes = (
        node("prompts", "source", 1, 1, work="source"),
        node("rollout", "expand", 2, 1, read("prompts")),
        node("later", "expand", 4, 2, read("rollout")),
        node("left", "subset", 4, 4, read("later"), refill=refill, work="select"),
        node("mean", "reduce", 2, 2, read("left", "later", fan_in=2), read("rollout")),
    )
    return PromptTable("prompts", nodes, ("mean",), Blocks())


def produced(it: PromptTable, node: str, *rows: tuple[int, int]) -> None:
    keys = Keys.of([p for p, _ in rows], [s for _, s in rows])
    zeros = np.zeros(len(rows), np.int32)
    it.produced(
        node, Ref(worker="w", block=0, keys=keys, lengths=zeros.astype(np.int64), version=zeros)
    )


def begun(it: PromptTable, prompts: int = 1) -> None:
    it.admit(range(prompts), [0] * prompts, 0)
    for node, width in (("prompts", 1), ("rollout", 2), ("later", 4)):
        produced(it, node, *((p, s) for p in range(prompts) for s in range(width)))
        it.pump()


def only(found: list[Ready]) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """The rows of the one chunk that is ready, and for each of their descendants the row that it
    belongs to.
    """
    (ready,) = found
    (reading,) = ready.inputs["left"]
    assert reading.keys is not None
    return ready.keys.rows(), reading.keys.rows()


def test_the_rows_that_each_belongs_to_cross_to_another_process() -> None:
    it = lane()
    begun(it)
    produced(it, "left", (0, 1), (0, 2))
    it.closed(it.nodes[3], Keys.of([0] * 4, range(4)))
    (ready,) = it.pump()
    told = RunChunk(
        id=1,
        node="mean",
        worker="w",
        step=1,
        keys=ready.keys,
        inputs=it.blocks.gathers(ready.inputs),
    )
    came = decode(encode(told))
    assert came.inputs["left"][0].keys.rows() == [(0, 0, 0), (0, 1, 0)]
    assert came.inputs["rollout"] == ()


@pytest.mark.parametrize("chunking", ["cohort", "ready"])
def test_a_row_waits_for_all_of_its_own_and_reads_those_that_are_left(chunking: str) -> None:
    it = lane(chunking=chunking)
    begun(it)
    select = it.nodes[3]
    produced(it, "left", (0, 0), (0, 3))
    assert it.pump() == [], "rows 1 and 2 of turn 2 may still come"
    it.closed(select, Keys.of([0] * 4, range(4)))
    assert only(it.pump()) == ([(0, 0, 0), (0, 1, 0)], [(0, 0, 0), (0, 1, 0)])


def test_a_row_of_which_nothing_is_left_is_in_the_chunk() -> None:
    it = lane()
    begun(it)
    produced(it, "left", (0, 2), (0, 3))
    it.closed(it.nodes[3], Keys.of([0] * 4, range(4)))
    assert only(it.pump()) == (
        [(0, 0, 0), (0, 1, 0)],
        [(0, 1, 0), (0, 1, 0)],
    ), "its kernel tombstones the first"


def test_what_a_refilling_select_rejects_is_no_tombstone() -> None:
    it = lane(refill=True)
    begun(it)
    it.closed(it.nodes[3], Keys.of([0] * 4, range(4)))
    assert it.pump() == []
    assert len(it.slots(REJECTED)) == 1


def test_a_prompt_that_was_given_up_above_fails_no_second_time() -> None:
    it = lane(chunking="ready")
    it.admit([0, 1], [0, 0], 0)
    for node, width in (("prompts", 1), ("rollout", 2)):
        produced(it, node, *((p, s) for p in range(2) for s in range(width)))
        it.pump()
    produced(it, "later", (0, 0), (1, 0), (1, 1), (1, 2), (1, 3))
    it.drop("later", 0, 0)
    it.pump()
    produced(it, "left", (1, 1), (1, 2))
    it.closed(it.nodes[3], Keys.of([1] * 4, range(4)))
    assert only(it.pump()) == ([(1, 0, 0), (1, 1, 0)], [(1, 0, 0), (1, 1, 0)])
    assert len(it.slots(DROPPED)) == 1
    produced(it, "mean", (1, 0), (1, 1))
    it.pump()
    assert len(it.slots(FINISHED)) == 1
