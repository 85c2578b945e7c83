"""Slabs and their outbox: memory is reused, bounded, sealed, and spills."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError, RunError
from engine.channels.contract import BlockRequest, PeerLost
from engine.channels.frames import Framed, put_together_checked, take_apart
from engine.channels.shm import slabs
from engine.channels.shm.channel import ShmChannel
from engine.channels.shm.outbox import SlabOutbox
from tests.kit.nothing_left import descriptors
from tests.kit.turns import example_count

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[slabs.SlabPool]:
    """A pool with room for 64 MiB."""
    pool = slabs.SlabPool(limit=64 * MIB, poison=True)
    yield pool
    pool.close()


def batch_of(**columns: Any) -> Batch:
    """Rows 0, 1, ... of these columns."""
    records = pa.RecordBatch.from_pydict(columns)
    return Batch(Keys.of(range(len(records))), records)


def numbers(count: int, start: int = 0) -> Batch:
    """One column of int64."""
    return batch_of(x=np.arange(start, start + count))


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [(3 * MIB, 3 * MIB - 5000, True), (20 * MIB, 4 * MIB, False)],
    ids=["as large", "much larger"],
)
def test_a_free_slab_is_used_again_unless_it_is_much_larger(pool, before, after, same) -> None:
    first = pool.allocate(before)
    pool.let_go(first)
    assert (pool.allocate(after).slab is first.slab) == same


def test_small_regions_share_a_slab_and_free_it_together(pool) -> None:
    some = [pool.allocate(1000) for _ in range(10)]
    assert {r.slab for r in some} == {some[0].slab}
    assert [r.offset % 64 for r in some] == [0] * 10
    assert pool.nbytes == slabs.FIRST
    for region in some:
        pool.let_go(region)
    assert pool.allocate(1000).offset == 0


def test_slabs_of_small_regions_grow_with_what_is_kept_alone(pool) -> None:
    """Few regions at a time take two slabs, however many come; many take ever larger ones."""
    before = pool.allocate(slabs.FIRST // 2)
    for _ in range(40):
        region = pool.allocate(slabs.FIRST // 2)
        pool.let_go(before)
        before = region
    assert pool.nbytes <= 3 * slabs.FIRST
    kept = [pool.allocate(slabs.SMALL) for _ in range(40)]
    sizes = list(dict.fromkeys(region.slab.size for region in kept))
    assert sizes == sorted(sizes)
    assert sizes[-1] == slabs.SHARED
    assert len({region.slab.number for region in kept}) < 10


@settings(max_examples=example_count(40))
@given(st.lists(st.tuples(st.integers(1, 3 * MIB), st.integers(0, 5)), max_size=30))
def test_live_regions_never_overlap_and_memory_stays_bounded(steps) -> None:
    pool = slabs.SlabPool(limit=16 * MIB)
    live = []
    for number, (length, drops) in enumerate(steps):
        region = pool.allocate(length)
        region.bytes()[:] = number % 251
        live.append((region, number % 251))
        for _ in range(min(drops, len(live))):
            pool.let_go(live.pop(0)[0])
        for held, value in live:
            assert (held.bytes()[[0, held.length // 2, -1]] == value).all()
        assert pool.nbytes <= 16 * MIB
        assert pool.live == len(live)
    for held, _ in live:
        pool.let_go(held)
    assert (pool.live, pool.spilled) == (0, 0)
    pool.close()


def test_the_size_is_sealed_and_others_cannot_write(pool) -> None:
    descriptor = pool.allocate(100).slab.descriptor
    assert slabs.is_sealed(descriptor)
    for size in (0, 2 * slabs.FIRST):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & slabs.F_SEAL_FUTURE_WRITE:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, slabs.FIRST)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)


def test_beyond_the_limit_it_spills_to_a_file_without_a_name(tmp_path) -> None:
    pool = slabs.SlabPool(limit=10 * MIB, directory=tmp_path)
    kept = pool.allocate(8 * MIB)
    spilled = pool.allocate(6 * MIB)
    assert spilled.slab.on_disk
    assert not kept.slab.on_disk
    assert pool.spilled == spilled.slab.size >= 6 * MIB
    assert list(tmp_path.iterdir()) == []
    spilled.bytes()[:] = 7
    assert os.pread(spilled.slab.descriptor, 3, 0) == b"\7\7\7"
    pool.let_go(spilled)
    assert (pool.spilled, pool.gone()) == (0, [spilled.slab.number])
    pool.let_go(kept)
    assert not pool.allocate(9 * MIB).slab.on_disk  # free slabs make room
    pool.close()


def test_a_full_disk_is_one_clear_error(tmp_path, monkeypatch) -> None:
    pool = slabs.SlabPool(limit=0, directory=tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", full)
    message = rf"room for 2 MiB, found: No space left.*Fix: free space in {tmp_path}"
    with pytest.raises(RunError, match=message):
        pool.allocate(2 * MIB)
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []


def test_no_descriptors_left_is_one_clear_error(pool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 3, hard))
    try:
        with pytest.raises(RunError, match=r"Too many open files.*Fix: ulimit -n"):
            [pool.allocate(2 * MIB) for _ in range(9)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert pool.allocate(2 * MIB).length == 2 * MIB


def test_one_array_in_two_blocks_stays_until_both_are_released(pool) -> None:
    outbox = SlabOutbox(pool, 0)
    memory = outbox.allocate(80)
    memory.view(np.int64)[:] = range(10)
    column = pa.Array.from_buffers(pa.int64(), 10, [None, pa.py_buffer(memory)])
    records = batch_of(x=column).records
    blocks = [outbox.keep(Batch(Keys.of(range(5)), records.slice(5 * i, 5))) for i in range(2)]
    del memory, column, records
    gc.collect()
    outbox.release(blocks[0])
    assert outbox.records(blocks[1], ()).column("x").to_pylist() == [5, 6, 7, 8, 9]
    outbox.release(blocks[1])
    assert pool.live == 0


def test_a_column_that_cannot_travel_takes_no_memory(pool) -> None:
    outbox = SlabOutbox(pool, 0)
    with pytest.raises(DataError, match=r"column 'x'.*string_view"):
        outbox.keep(batch_of(x=pa.array(["a"], pa.string_view())))
    assert (pool.live, len(outbox)) == (0, 0)


@pytest.fixture
def pair(tmp_path) -> Iterator[Callable[..., tuple[ShmChannel, ShmChannel]]]:
    """Makes two channels, of which b can dial a."""
    channels: list[ShmChannel] = []

    def make(**options: object) -> tuple[ShmChannel, ShmChannel]:
        def dial(peer: str) -> socket.socket:
            if peer != "a":
                raise PeerLost(peer, "is not there")
            mine, its = socket.socketpair()
            channels[0].serve("b", its)
            return mine

        channels.extend(ShmChannel(n, 0, dial, directory=tmp_path, **options) for n in "ab")  # type: ignore[arg-type]
        return channels[0], channels[1]

    yield make
    for channel in channels:
        channel.close()


def read(channel: ShmChannel, block: int) -> pa.RecordBatch:
    (found,) = channel.fetch([BlockRequest(worker="a", block=block)])
    return found


def test_views_share_the_producers_memory(pair) -> None:
    a, b = pair()
    block = a.keep(numbers(1000))
    own, other = read(a, block).column("x"), read(b, block).column("x")
    # Mapped twice: written in one, it shows in the other.
    a._pool._slabs[0].bytes(0, 8).view(np.int64)[0] = 77
    assert (own[0].as_py(), other[0].as_py()) == (77, 77)
    assert not other.buffers()[1].is_mutable


def test_a_descriptor_comes_once_for_each_slab(pair) -> None:
    a, b = pair()
    before = descriptors()
    for start in range(50):
        block = a.keep(numbers(10, start))
        assert read(b, block).column("x")[0].as_py() == start
        a.release(block)
    assert len(b._peers.readers["a"]) == 1
    assert descriptors() - before <= 8


def test_a_reader_lets_go_of_slabs_that_are_gone(pair) -> None:
    a, b = pair(limit=12 * MIB)
    first = a.keep(numbers(MIB))  # 8 MiB
    kept = read(b, first)
    a.release(first)
    second = a.keep(numbers(MIB + MIB // 4))  # 10 MiB: the first slab has to go for it
    read(b, second)
    read(b, second)
    assert len(b._peers.readers["a"]) == 1
    assert kept.column("x")[-1].as_py() == MIB - 1  # a view keeps its mapping


def test_spilled_blocks_are_read_like_others(pair) -> None:
    a, b = pair(limit=9 * MIB, verify="content")
    blocks = [a.keep(numbers(MIB // 2, start)) for start in range(4)]
    assert a.spilled_bytes > 0
    for start, block in enumerate(blocks):
        assert read(b, block).equals(numbers(MIB // 2, start).records)
        a.release(block)
    assert a.spilled_bytes == 0


def test_nothing_is_left_open(pair) -> None:
    before = descriptors()
    a, b = pair(limit=9 * MIB)
    for start in range(3):
        read(b, a.keep(numbers(MIB // 2, start)))
    read(a, a.keep(numbers(3)))
    a.close()
    b.close()
    gc.collect()
    assert descriptors() == before


def framed(part: pa.RecordBatch) -> Framed:
    """A batch taken apart; put together, it is what it was, and begins anew."""
    parts = take_apart(part)
    found = put_together_checked(parts.layout, part.num_rows, parts.nodes, parts.buffers)
    assert found.equals(part)
    assert not any(column.offset for column in found.columns)
    return parts


@settings(max_examples=example_count(40))
@given(
    values=st.lists(st.none() | st.lists(st.none() | st.booleans(), max_size=5), max_size=40),
    start=st.integers(0, 20),
    length=st.integers(0, 20),
)
def test_of_a_slice_only_its_rows_travel(values, start, length) -> None:
    whole = pa.RecordBatch.from_pydict({"x": pa.array(values, pa.list_(pa.bool_()))})
    part = whole.slice(min(start, len(values)), length)
    nodes = framed(part).nodes
    assert nodes[1][0] == sum(len(v) for v in part.column("x").to_pylist() if v is not None)


@settings(max_examples=example_count(150))
@given(
    lengths=st.lists(st.integers(0, 4), max_size=12),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    skipped=st.integers(0, 2),
    start=st.integers(0, 3),
    length=st.integers(0, 12),
    null=st.sampled_from([None, 0, -1]),
    large=st.booleans(),
)
def test_wherever_the_values_of_lists_begin_only_those_of_its_rows_travel(
    lengths, before, after, skipped, start, length, null, large
) -> None:
    """Values are a slice, offsets do not begin at 0, the last belong to nobody, rows are some."""
    count = before + sum(lengths) + after
    numbers = list(range(skipped + count))
    if null is not None and count:
        numbers[skipped if null == 0 else -1] = None
    values = pa.array(numbers, pa.int32()).slice(skipped)
    offsets = pa.array(np.cumsum([before, *lengths]), pa.int64() if large else pa.int32())
    lists = (pa.LargeListArray if large else pa.ListArray).from_arrays(offsets, values)
    part = pa.RecordBatch.from_arrays([lists, pa.array(range(len(lengths)))], ["x", "y"]).slice(
        min(start, len(lengths)), length
    )
    rows, parts = part.column("x").to_pylist(), framed(part)
    there = sum(map(len, rows))
    assert parts.nodes[1] == (there, sum(row.count(None) for row in rows))
    assert (parts.buffers[3].size if parts.buffers[3] is not None else 0) == 4 * there


def test_a_slice_of_a_large_column_is_not_sent_whole() -> None:
    whole = pa.RecordBatch.from_pydict({"x": pa.array(["y" * 100] * 1000)})
    assert take_apart(whole.slice(500, 2)).nbytes < 300
