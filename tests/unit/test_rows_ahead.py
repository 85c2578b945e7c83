"""Rows fetched ahead: what is here is not fetched again, and a wrong guess changes no row."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError
from engine.channels.contract import BlockRequest, Channel, PeerLost, Requests
from engine.channels.inproc import InprocChannel
from engine.protocol import messages as m
from engine.protocol.refs import Gather
from engine.run.worker.rows_ahead import FetchedRows, RowsAhead
from tests.contracts.pull_worlds import shm
from tests.kit.turns import example_count

SOON = 20.0


class CountedChannel(InprocChannel):
    """Rows of another Worker. fetched: how often each block was asked for, in the task's own time
    and beside it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.asked_beside: list[int] = []
        self.lost = False
        self.began = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def fetch(self, requests: Requests) -> list[pa.RecordBatch]:
        self.asked += [request.block for request in requests]
        return super().fetch(requests)

    def fetch_beside(self, requests: Requests) -> list[pa.RecordBatch]:
        self.asked_beside += [request.block for request in requests]
        self.began.set()
        assert self.may_answer.wait(SOON)
        if self.lost:
            raise PeerLost("gen", "is gone")
        return super().fetch(requests)


def kept(channel: Channel, *values: int) -> int:
    """A block with a column x of these values."""
    records = pa.RecordBatch.from_pydict({"x": pa.array(values)})
    return channel.keep(Batch(Keys.of(range(len(values))), records))


def message(block: int, rows: list[int], step: int = 2, node: str = "train_policy") -> m.FetchAhead:
    row = np.array(rows)
    refs, zeros = (("gen", block),), np.zeros_like(row)
    gather = Gather(producer="rollout", columns=("x",), refs=refs, block=zeros, row=row)
    keys = {"rows": Keys.of(rows)}
    return m.FetchAhead(node=node, worker="t0", step=step, keys=keys, inputs={"rows": (gather,)})


def request(block: int, rows: list[int]) -> BlockRequest:
    return BlockRequest(worker="gen", block=block, columns=("x",), rows=np.array(rows))


def begun(channel: CountedChannel, *messages: m.FetchAhead, worker: str = "t0") -> RowsAhead:
    """What fetches these ahead, with the first of them under way."""
    ahead = RowsAhead(worker, channel)
    for each in messages:
        ahead.begin(each)
    assert channel.began.wait(SOON)
    return ahead


def fetched(ahead: RowsAhead, node: str, *requests: BlockRequest) -> list[list[int]]:
    return [batch.column("x").to_pylist() for batch in ahead.fetch(node, requests)]


def test_rows_that_are_here_are_not_fetched_again_and_the_rest_is() -> None:
    channel = CountedChannel()
    first, second = kept(channel, 10, 11, 12), kept(channel, 20, 21)
    ahead = begun(channel, message(first, [0, 2]))
    rows = fetched(ahead, "train_policy", request(first, [2]), request(second, [1, 0]))
    assert rows == [[12], [21, 20]]
    assert (channel.asked_beside, channel.asked) == ([first], [second])
    (report,) = ahead.reports()
    assert report[0] == "edge/ahead/bytes"
    assert not ahead.reports()


def test_a_task_waits_for_the_fetch_that_is_under_way() -> None:
    channel = CountedChannel()
    block = kept(channel, 1, 2)
    channel.may_answer.clear()
    ahead = begun(channel, message(block, [0, 1]))
    threading.Timer(0.05, channel.may_answer.set).start()
    assert fetched(ahead, "train_policy", request(block, [0, 1])) == [[1, 2]]
    assert not channel.asked


def test_rows_of_other_nodes_and_of_a_step_that_has_its_rows_are_not_used() -> None:
    channel = CountedChannel()
    block = kept(channel, 1, 2)
    ahead = begun(channel, message(block, [0, 1]))
    fetched(ahead, "other", request(block, [0]))
    ahead.end_step("train_policy", 2)
    fetched(ahead, "train_policy", request(block, [0]))
    assert channel.asked == [block, block]


def test_the_end_of_a_step_leaves_what_other_nodes_get_in_it() -> None:
    channel = CountedChannel()
    block = kept(channel, 1, 2)
    ahead = begun(channel, message(block, [0], node="critic"))
    ahead.end_step("train_policy", 2)
    assert fetched(ahead, "critic", request(block, [0])) == [[1]]
    ahead.end_step("train_policy", 3)
    assert fetched(ahead, "critic", request(block, [0])) == [[1]]
    assert channel.asked == [block]


@pytest.mark.parametrize("how", ["lost", "released"])
def test_a_guess_that_comes_to_nothing_is_no_error(how: str) -> None:
    channel = CountedChannel()
    block, other = kept(channel, 1), kept(channel, 2)
    channel.lost = how == "lost"
    if how == "released":
        channel.release(block)
    ahead = begun(channel, message(block, [0]))
    assert fetched(ahead, "train_policy", request(other, [0])) == [[2]]


def test_what_this_worker_keeps_is_not_fetched() -> None:
    channel = CountedChannel()
    block = kept(channel, 1)
    begun(channel, message(block, [0]), worker="gen").end_step("train_policy", 2)
    assert not channel.asked_beside


@given(
    here=st.none() | st.lists(st.integers(0, 9), unique=True),
    wanted=st.none() | st.lists(st.integers(0, 9)),
)
def test_rows_are_selected_as_the_block_would(
    here: list[int] | None, wanted: list[int] | None
) -> None:
    whole = pa.RecordBatch.from_pydict({"x": pa.array(range(100, 110))})
    rows = None if here is None else np.array(here, np.int64)
    records = whole if rows is None else whole.take(pa.array(rows))
    asked = None if wanted is None else np.array(wanted, np.int64)
    batch = FetchedRows(rows, records).select(asked)
    is_here = here is None or (wanted is not None and set(wanted) <= set(here))
    assert (batch is not None) == is_here
    if batch is not None:
        numbers = range(10) if wanted is None else wanted
        assert batch.column("x").to_pylist() == [100 + number for number in numbers]


def test_other_columns_of_a_block_are_fetched() -> None:
    channel = CountedChannel()
    records = pa.RecordBatch.from_pydict({"x": pa.array([1]), "y": pa.array([2])})
    block = channel.keep(Batch(Keys.of([0]), records))
    ahead = begun(channel, message(block, [0]))
    asked = BlockRequest(worker="gen", block=block, columns=("y",), rows=np.array([0]))
    (batch,) = ahead.fetch("train_policy", [asked])
    assert batch.column("y").to_pylist() == [2]


def test_the_end_of_a_step_leaves_the_rows_of_the_next_one() -> None:
    channel = CountedChannel()
    block = kept(channel, 1)
    ahead = begun(channel, message(block, [0], step=3))
    ahead.end_step("train_policy", 2)
    assert fetched(ahead, "train_policy", request(block, [0])) == [[1]]
    assert not channel.asked


def test_a_step_ends_once_nobody_reads_rows_that_a_later_message_made_needless() -> None:
    channel = CountedChannel()
    block = kept(channel, 1)
    channel.may_answer.clear()
    ahead = begun(channel, message(block, [0]), message(block, [0]))
    threading.Timer(0.05, channel.may_answer.set).start()
    ahead.end_step("train_policy", 2)
    assert channel.may_answer.is_set()


def test_an_error_that_nobody_expects_is_told_once_and_by_who_takes_the_rows() -> None:
    channel = CountedChannel()
    block = kept(channel, 1)
    row = np.array([0])
    gather = Gather(
        producer="rollout", columns=("y",), refs=(("gen", block),), block=np.zeros(1, int), row=row
    )
    wrong = m.FetchAhead(
        node="train_policy",
        worker="t0",
        step=2,
        keys={"rows": Keys.of([0])},
        inputs={"rows": (gather,)},
    )
    ahead = begun(channel, wrong)
    with pytest.raises(DataError, match="y"):
        ahead.fetch("train_policy", [request(block, [0])])
    ahead.begin(message(block, [0]))
    assert fetched(ahead, "train_policy", request(block, [0])) == [[1]]
    ahead.end_step("train_policy", 2)


STEPS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0, 1, 2]), max_size=3),  # guesses: blocks that are fetched ahead
        st.sampled_from([0, 1, 2]),  # the block that the task reads
        st.lists(st.integers(0, 3), min_size=1, max_size=4),  # and its rows
        st.booleans(),  # whether the Worker that keeps them dies before
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=example_count(60), deadline=None)
@given(steps=STEPS)
def test_whatever_was_guessed_a_task_has_its_rows_and_no_released_memory(
    steps: list[tuple[list[int], int, list[int], bool]],
) -> None:
    """Over shared memory, where released blocks are filled with other bytes."""
    world, is_here = shm(), True
    ahead = RowsAhead("t0", world["t0"])
    for step, (guesses, place, rows, dies) in enumerate(steps):
        if is_here:
            gen = world["gen"]
            firsts = [1000 * step + 10 * number for number in range(3)]
            blocks = [kept(gen, *range(first, first + 4)) for first in firsts]
        for guess in guesses:
            ahead.begin(message(blocks[guess], [3, 1, 0], step))
        if dies and is_here:
            is_here = False
            world.kill("gen")
        if is_here:
            expected = [firsts[place] + row for row in rows]
            assert fetched(ahead, "train_policy", request(blocks[place], rows)) == [expected]
        else:
            with suppress(PeerLost):  # unless all were here before
                fetched(ahead, "train_policy", request(blocks[place], rows))
        ahead.end_step("train_policy", step)
        for block in blocks if is_here else ():
            gen.release(block)
    world.close()
