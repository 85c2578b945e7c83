"""What every pull channel promises, one suite for all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pull_rows import VOCABULARY, batch, rollouts
from pull_worlds import KINDS, ChannelWorld, fetched, of_a

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError
from dataflow.schema import Rollout
from engine.channels.contract import BlockRequest, PeerLost

BETWEEN = [kind for kind in KINDS if kind != "inproc"]
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", params=list(KINDS))
def world(request: pytest.FixtureRequest) -> Iterator[ChannelWorld]:
    """Workers for the tests that do not harm them."""
    world = KINDS[request.param]()
    world["a"], world["b"], world["c"]
    yield world
    world.close()


@pytest.fixture(params=BETWEEN)
def mortal(request: pytest.FixtureRequest) -> Iterator[ChannelWorld]:
    """Workers that a test may kill."""
    world = KINDS[request.param]()
    world["a"], world["b"]
    yield world
    world.close()


def equal_rows(found: pa.RecordBatch, expected: pa.RecordBatch) -> bool:
    return found.schema.equals(expected.schema) and found.to_pylist() == expected.to_pylist()


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    schema=st.sampled_from(VOCABULARY),
    rows=st.integers(0, 20),
    seed=st.integers(0, 999),
    skipped=st.integers(0, 11),
)
def test_every_column_of_every_schema_arrives_as_it_was(world, schema, rows, seed, skipped) -> None:
    rows_made = batch(schema, rows, seed, skipped=skipped)
    block = world["a"].keep(rows_made)
    found = fetched(world, block)
    found.validate(full=True)
    assert equal_rows(found, rows_made.records)
    world["a"].release(block)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_columns_and_rows_in_the_order_asked_for(world, data) -> None:
    rows_made = batch(Rollout, 9, 3)
    block = world["a"].keep(rows_made)
    columns = data.draw(st.lists(st.sampled_from(rows_made.names), unique=True, min_size=1))
    rows = np.array(data.draw(st.lists(st.integers(0, 8), max_size=12)), dtype=np.int64)
    expected = rows_made.records.select(columns).take(pa.array(rows))
    assert equal_rows(fetched(world, block, columns=tuple(columns), rows=rows), expected)
    world["a"].release(block)


def test_a_star_stands_for_all_that_begin_so(world) -> None:
    names = ("reward", "reward/a", "reward/b", "other")
    records = pa.RecordBatch.from_arrays(
        [pa.array([float(i)]) for i in range(4)], names=list(names)
    )
    block = world["a"].keep(Batch(Keys.of([0]), records))
    some = fetched(world, block, columns=("reward/*", "other"))
    assert some.schema.names == ["reward/a", "reward/b", "other"]
    assert fetched(world, block, columns=("nothing/*",)).num_columns == 0
    told = r"no column 'rewards'; there are: reward, reward/a, reward/b, other"
    with pytest.raises(DataError, match=told):
        fetched(world, block, columns=("rewards",))


def test_no_rows_and_no_columns(world) -> None:
    empty = batch(Rollout, 0, 0)
    block = world["a"].keep(empty)
    assert equal_rows(fetched(world, block), empty.records)
    assert fetched(world, block, rows=np.zeros(0, np.int64)).num_rows == 0
    bare = world["a"].keep(Batch(Keys.of(range(3)), pa.RecordBatch.from_arrays([], names=[])))
    assert fetched(world, bare).num_columns == 0


def test_64_megabytes(world) -> None:
    rows_made = rollouts(64, 62_000)
    assert rows_made.nbytes > 64 << 20
    block = world["a"].keep(rows_made)
    assert fetched(world, block).equals(rows_made.records)
    some = np.array([5, 2])
    assert fetched(world, block, rows=some).equals(rows_made.records.take(pa.array(some)))
    world["a"].release(block)


def test_several_workers_at_once_and_ones_own_rows_among_them(world) -> None:
    kept = {name: rollouts(5, 7, seed) for seed, name in enumerate("abc")}
    blocks = {name: world[name].keep(rows) for name, rows in kept.items()}
    order = "cabacb"
    found = world["b"].fetch([BlockRequest(worker=name, block=blocks[name]) for name in order])
    assert all(f.equals(kept[name].records) for f, name in zip(found, order, strict=True))
    assert world["b"].fetch([]) == []


def test_readers_in_several_threads(world) -> None:
    kept = rollouts(20, 50)
    block = world["a"].keep(kept)
    wrong: list[object] = []

    def read(name: str) -> None:
        for _ in range(20):
            (found,) = world[name].fetch(of_a(block))
            if not found.equals(kept.records):
                wrong.append(found)

    threads = [threading.Thread(target=read, args=(name,)) for name in "bcbc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_was_built_in_the_outbox_arrives_like_the_rest(world) -> None:
    memory = world["a"].allocate(8 * 100)
    assert memory.nbytes == 800
    memory.view(np.float64)[:] = np.arange(100)
    built = pa.Array.from_buffers(pa.float64(), 100, [None, pa.py_buffer(memory)])
    records = pa.RecordBatch.from_pydict({"x": built, "y": pa.array(range(100))})
    block = world["a"].keep(Batch(Keys.of(range(100)), records))
    del memory, built
    found = fetched(world, block)
    assert found.column("x").to_pylist() == found.column("y").to_pylist() == list(range(100))
    world["a"].release(block)


def test_a_released_block_is_gone(world) -> None:
    block = world["a"].keep(rollouts(2, 3))
    kept = world["a"].keep(rollouts(2, 3))
    world["a"].release(block)
    with pytest.raises(KeyError, match=str(block)):
        fetched(world, block)
    with pytest.raises(KeyError):
        world["a"].release(block)
    with pytest.raises(KeyError):
        fetched(world, 10**6)
    assert fetched(world, kept).num_rows == 2


def test_block_numbers_never_repeat_after_a_respawn(mortal) -> None:
    before = [mortal["a"].keep(rollouts(1, 1)) for _ in range(3)]
    assert fetched(mortal, before[0]).num_rows == 1
    mortal.kill("a")
    mortal.respawn("a", 1)
    after = mortal["a"].keep(rollouts(2, 1))
    assert after == 1 << 32
    assert not {after} & set(before)
    for _ in range(2):  # the first time the connection may still be to the dead one
        with pytest.raises(PeerLost, match="a: "):
            fetched(mortal, before[0])
    assert fetched(mortal, after).num_rows == 2
    with pytest.raises(KeyError):
        fetched(mortal, after + 1)


def test_a_dead_peer_is_lost_at_once(mortal) -> None:
    block = mortal["a"].keep(rollouts(3, 3))
    read = fetched(mortal, block)
    copy = read.to_pylist()
    mortal.kill("a")
    assert read.to_pylist() == copy  # what was read stays readable
    for _ in range(2):
        with pytest.raises(PeerLost) as lost:
            fetched(mortal, block)
        assert lost.value.peer == "a"


def test_rows_that_no_other_process_can_read_are_refused_when_they_are_kept(mortal) -> None:
    column = pa.array(["x", "y", "x"]).dictionary_encode()
    with pytest.raises(DataError, match=r"column 'task': .*Fix: cast"):
        mortal["a"].keep(Batch(Keys.of(range(3)), pa.RecordBatch.from_pydict({"task": column})))
