"""Rows of chunks that will join a run: each is fetched once, taken once, and nothing hangs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.schema import Prompt
from engine.channels.contract import Channel, PeerLost
from engine.protocol import messages as m
from engine.run.worker.joined_inputs import JoinedInputs
from engine.run.worker.rows import WorkerRows
from tests.contracts.pull_worlds import shm
from tests.kit import flowing_kernels, host_plans
from tests.kit.told_worker import SOON, GatedChannel
from tests.kit.turns import example_count

PLAN = flowing_kernels.plan()


def chunk_of_texts(channel: Channel, number: int, *texts: str) -> m.RunChunk:
    """A chunk of `doubled` on rows that the Worker `source` keeps."""
    keys = Keys.of(range(10 * number, 10 * number + len(texts)))
    batch = Batch.make(keys, {"prompt": list(texts)}, Prompt)
    ref = WorkerRows("source", PLAN, channel).keep("numbers", batch)
    return host_plans.chunk_of(number, ref)


def take_texts(joined: JoinedInputs, chunk: m.RunChunk) -> list[str]:
    return joined.take(chunk)["prompt"].array("prompt").to_pylist()


@pytest.fixture
def channel() -> GatedChannel:
    return GatedChannel("host")


@pytest.fixture
def joined(channel: GatedChannel) -> Iterator[JoinedInputs]:
    inputs = JoinedInputs(WorkerRows("host", PLAN, channel))
    yield inputs
    channel.may_answer.set()
    inputs.close()


def test_rows_are_fetched_once_however_often_they_are_asked_for(
    channel: GatedChannel, joined: JoinedInputs
) -> None:
    chunk = chunk_of_texts(channel, 1, "a", "b")
    for _ in range(3):
        joined.begin(chunk)
    assert joined.has_begun(chunk)
    assert take_texts(joined, chunk) == ["a", "b"]
    joined.close()
    assert channel.asked == [0]


def test_rows_that_were_taken_are_here_no_more(channel: GatedChannel, joined: JoinedInputs) -> None:
    chunk = chunk_of_texts(channel, 1, "a")
    joined.begin(chunk)
    assert take_texts(joined, chunk) == ["a"]
    assert not joined.has_begun(chunk)
    assert take_texts(joined, chunk) == ["a"]
    assert channel.asked == [0, 0]


def test_a_chunk_is_ready_once_its_rows_are_here_and_this_is_told_once(
    channel: GatedChannel, joined: JoinedInputs
) -> None:
    chunk = chunk_of_texts(channel, 1, "a")
    calls: SimpleQueue[bool] = SimpleQueue()
    channel.may_answer.clear()
    joined.begin(chunk)
    joined.call_when_ready(chunk, lambda: calls.put(joined.is_ready(chunk)))
    assert channel.began.acquire(timeout=SOON)
    assert not joined.is_ready(chunk)
    assert calls.empty()
    channel.may_answer.set()
    assert calls.get(timeout=SOON), "it is ready by then"
    assert calls.empty()


def test_of_a_chunk_that_nobody_asked_for_nothing_is_on_its_way(
    channel: GatedChannel, joined: JoinedInputs
) -> None:
    chunk = chunk_of_texts(channel, 1, "a")
    calls: list[int] = []
    assert not joined.has_begun(chunk)
    assert joined.is_ready(chunk)
    joined.call_when_ready(chunk, lambda: calls.append(1))
    assert calls == [1]
    assert take_texts(joined, chunk) == ["a"]


def test_who_takes_rows_that_are_gone_hears_of_it_and_others_go_on(
    channel: GatedChannel, joined: JoinedInputs
) -> None:
    first, second = chunk_of_texts(channel, 1, "a"), chunk_of_texts(channel, 2, "b")
    channel.lost = {"source"}
    joined.begin(first)
    with pytest.raises(PeerLost, match="source"):
        joined.take(first)
    channel.lost.clear()
    joined.begin(second)
    assert take_texts(joined, second) == ["b"]
    assert channel.asked == [0, 1]


@pytest.mark.parametrize("how", ["forget", "close"])
def test_rows_that_nobody_wants_are_dropped_and_those_that_wait_are_not_fetched(
    channel: GatedChannel, joined: JoinedInputs, how: str
) -> None:
    chunks = [chunk_of_texts(channel, number, "a") for number in range(3)]
    channel.may_answer.clear()
    for chunk in chunks:
        joined.begin(chunk)
    assert channel.began.acquire(timeout=SOON)
    joined.call_when_ready(chunks[2], channel.may_answer.set)
    if how == "forget":
        joined.forget()
        assert channel.may_answer.is_set(), "nothing of it is on its way any more"
        assert not any(map(joined.has_begun, chunks))
    joined.close()
    assert channel.asked == [0], "the one under way"


ACTS = st.sampled_from(["begin", "take", "forget", "kill"])


@settings(max_examples=example_count(60), deadline=None)
@given(acts=st.lists(st.tuples(ACTS, st.integers(0, 3)), max_size=12))
def test_whatever_comes_in_between_a_chunk_gets_its_own_rows_or_an_error(
    acts: list[tuple[str, int]],
) -> None:
    """Over shared memory, with a thread that fetches, and a Worker that dies at any moment."""
    world = shm()
    chunks = [chunk_of_texts(world["source"], number, f"row {number}") for number in range(4)]
    joined = JoinedInputs(WorkerRows("host", PLAN, world["host"]))
    here = {"source"}
    for act, number in acts:
        chunk = chunks[number]
        if act == "begin":
            joined.begin(chunk)
        elif act == "forget":
            joined.forget()
        elif act == "kill":
            if here:
                world.kill(here.pop())
        else:
            # Of a Worker that is gone only what was fetched before.
            with nullcontext() if here else suppress(PeerLost):
                assert take_texts(joined, chunk) == [f"row {number}"]
            assert not joined.has_begun(chunk)
    joined.close()
    world.close()
