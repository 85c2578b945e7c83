"""Rows by broadcast, over gloo between real processes: what arrives is what was given, to the bit, or is refused."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from dataflow.errors import RunError
from dataflow.schema import Advantage, Prompt, Reward, Rollout
from engine.channels.collective import CollectiveChannel
from engine.channels.contract import PeerLost
from engine.channels.descriptors import Lacks, Unknown
from engine.channels.multipart import Sent, header_bytes, sent
from engine.channels.rowcast import RowCast
from tests.contracts.pull_rows import batch, rollouts
from tests.contracts.ranks import Ranks, client

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(3)
    yield pool
    pool.close()


def rows() -> list[dict[str, pa.RecordBatch]]:
    """What is given, one broadcast after another: schemas of the vocabulary, with nulls, empty, sliced, large."""
    many = {kind.__name__: batch(kind, 40, seed).records for seed, kind in enumerate((Prompt, Rollout, Reward))}
    nulls = pa.record_batch({"a": pa.array([1, None, 3]), "b": pa.array([["x"], None, []]), "c": pa.nulls(3)})
    return [
        many,
        {"rows": batch(Rollout, 0, 1).records, "loss.advantage": batch(Advantage, 0, 2).records},
        {"nulls": nulls, "none": pa.RecordBatch.from_arrays([], names=[])},
        {"part": many["Rollout"].slice(7, 11)},
        {"large": rollouts(4000, 1200).records},
        {},
    ]


def cast_of(rank: int, size: int, port: int, name: str, timeout: float = 20.0) -> RowCast:
    names = [f"t{r}" for r in range(size)]
    channel = CollectiveChannel(rank, size, client(port), name=name, names=names, timeout=timeout)
    return RowCast(channel, giver="t0")


def given(rank: int, port: int, size: int) -> list[Any]:
    """Rank 0 gives everything; each other rank says whether it has the same, and how many bytes came."""
    ends = cast_of(rank, size, port, f"given {size}")
    said: list[Any] = []
    for inputs in rows():
        if rank == 0:
            ends.give(inputs)
            continue
        found = ends.take(list(inputs))
        said.append(list(found) == list(inputs))
        said += [found[name].equals(records) for name, records in inputs.items()]
        for records in found.values():
            records.validate(full=True)
    moved = ends.moved()
    ends.close()
    return [*said, moved, ends.moved()]


@pytest.mark.parametrize("size", [2, 3])
def test_rows_arrive_to_the_bit(ranks: Ranks, size: int) -> None:
    giver, *others = ranks.do(size, given, size)
    assert giver == [0, 0], "nothing comes to the rank that gives"
    large = rows()[4]["large"].nbytes
    for *same, moved, again in others:
        assert len(same) == 6 + sum(len(inputs) for inputs in rows())
        assert all(found is True for found in same)
        assert large <= moved < 1.1 * large
        assert again == 0


LIES = ("another number", "too few inputs", "a changed byte", "no header", "a long header")


def lies(rank: int, port: int) -> list[str]:
    """Rank 0 says what is not so, each in a world of its own; what rank 1 says of it, and what becomes of rank 0."""
    said = []
    for lie in LIES:
        channel = CollectiveChannel(rank, 2, client(port), name=lie, names=["t0", "t1"], timeout=20.0)
        if rank == 1:
            with pytest.raises(RunError) as found:
                RowCast(channel, giver="t0").take(["a", "b"])
            assert not isinstance(found.value, PeerLost)
            said.append(str(found.value))
            channel.close()
            continue
        records = batch(Reward, 5, 3).records
        answer, buffers = sent(0, records)
        second = sent(1, records)
        answers: list[Sent | Unknown | Lacks] = [answer] if lie == "too few inputs" else [answer, second[0]]
        header = bytearray(header_bytes(2 if lie == "another number" else 1, answers))
        header[20] ^= lie == "no header"
        data = [np.frombuffer(b, np.uint8).copy() for b in (*buffers, *second[1])]
        data[-1][0] ^= 1
        length = 1 << 40 if lie == "a long header" else len(header)
        messages = [
            [torch.tensor([length])],
            [torch.frombuffer(header, dtype=torch.uint8)],
            [*map(torch.from_numpy, data)],
        ]
        try:
            for number, tensors in enumerate(messages):
                channel.broadcast(0, number, tensors)
            said.append("nothing")
        except PeerLost as lost:
            said.append(str(lost))
        channel.close()
    return said


def test_what_cannot_be_right_is_refused_and_the_giver_is_told(ranks: Ranks) -> None:
    first, second = ranks.do(2, lies)
    for lie, told, wanted in zip(
        LIES,
        second,
        (
            "found rows 2 of 2",
            "found rows 1 of 1",
            "was changed on its way",
            "checksum is wrong",
            "1099511627776 bytes",
        ),
        strict=True,
    ):
        assert "t0: refused the rows that it gives" in told, lie
        assert wanted in told, lie
    assert all("did not end" in told for told in (first[0], first[1], first[3], first[4]))


def waits(rank: int, port: int) -> str:
    ends = cast_of(rank, 2, port, "waits")
    client(port).set(f"waits {rank}", "1")
    with pytest.raises(PeerLost) as found:
        ends.take(["a"])
    return str(found.value)


def test_a_giver_that_is_killed_leaves_nobody_waiting(ranks: Ranks) -> None:
    ranks.tell(1, waits)
    ranks.tell(0, stalls)
    ranks.store.wait(["waits 1", "stalls 0"], timedelta(seconds=30))
    ranks.signal(0, signal.SIGKILL)
    (told,) = ranks.answers([1])
    assert "t0: broadcast 0 with t1 did not end" in str(told)


def stalls(rank: int, port: int) -> None:
    """Joins, and then does nothing any more."""
    ends = cast_of(rank, 2, port, "waits")
    client(port).set(f"stalls {rank}", "1")
    threading.Event().wait()
    ends.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_go_through_a_device() -> None:
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    channel = CollectiveChannel(0, 1, store, name="device", device="cuda:0", timeout=20)
    ends = RowCast(channel, giver="t0", device="cuda:0")
    for inputs in rows():
        ends.give(inputs)
    ends.close()


def through_devices(rank: int, port: int) -> list[bool]:
    torch.cuda.set_device(rank)
    channel = CollectiveChannel(rank, 2, client(port), name="devices", device=f"cuda:{rank}", timeout=20)
    ends = RowCast(channel, giver="t0", device=f"cuda:{rank}")
    said = []
    for inputs in rows():
        if rank == 0:
            ends.give(inputs)
        else:
            found = ends.take(list(inputs))
            said += [found[name].equals(records) for name, records in inputs.items()]
    ends.close()
    return said


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_rows_go_from_device_to_device(ranks: Ranks) -> None:
    assert all(ranks.do(2, through_devices)[1])
