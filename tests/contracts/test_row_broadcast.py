"""Rows by broadcast, over gloo between real processes: they arrive to the bit, or are refused."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from msgspec.structs import replace

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import RunError
from dataflow.schema import Advantage, Prompt, Reward, Rollout, Schema, column
from engine.channels.block_requests import Reply, TensorLayout
from engine.channels.contract import PeerLost
from engine.channels.multipart import add_checksums, frame_block, seal_message
from engine.channels.tensors.collective import CollectiveChannel
from engine.channels.tensors.column_hashes import of_tensors
from engine.channels.tensors.row_broadcast import RowBroadcast, Taken
from tests.contracts.pull_rows import batch, rollouts
from tests.contracts.ranks import RankPool, client

pytestmark = pytest.mark.timeout(120)
RANKS = 3


class HiddenRows(Schema):
    """A vector for each token, and a number for each row, on a device."""

    hidden = column(pa.list_(pa.float32(), 8), "T", device=True)
    weight = column(pa.int64(), device=True)
    reward = column(pa.float32())


def on_devices() -> Batch:
    hidden = Ragged(torch.arange(48.0).reshape(6, 8), np.array([0, 2, 2, 6]))
    columns = {
        "hidden": hidden,
        "weight": torch.tensor([7, 8, 9]),
        "reward": np.ones(3, np.float32),
    }
    return Batch.make(Keys.of(range(3)), columns, HiddenRows)


def rows() -> list[dict[str, Batch]]:
    """The rows of each broadcast: schemas, nulls, empty, sliced, large batches, device columns."""
    many = {
        kind.__name__: batch(kind, 40, seed) for seed, kind in enumerate((Prompt, Rollout, Reward))
    }
    values = [["x"], None, []]
    nulls = pa.record_batch({"a": pa.array([1, None, 3]), "b": pa.array(values), "c": pa.nulls(3)})
    none = pa.RecordBatch.from_arrays([], names=[])
    return [
        many,
        {"rows": batch(Rollout, 0, 1), "loss.advantage": batch(Advantage, 0, 2)},
        {"nulls": Batch(Keys.of(range(3)), nulls), "none": Batch(Keys.of([]), none)},
        {"part": Batch(Keys.of(range(11)), many["Rollout"].records.slice(7, 11))},
        {"large": rollouts(4000, 1200)},
        {
            "plain": many["Reward"],
            "hidden": on_devices(),
            "some": on_devices().take(np.array([2, 0])),
        },
        {},
    ]


def equal_batch(given: Batch, taken: Taken) -> bool:
    records, values = taken
    records.validate(full=True)
    equal = [torch.equal(given.device[name], tensor.cpu()) for name, tensor in values.items()]
    return records.equals(given.records) and values.keys() == given.device.keys() and all(equal)


def cast_of(
    rank: int, size: int, port: int, name: str, content: bool = False, device: str = "cpu"
) -> RowBroadcast:
    names = [f"t{r}" for r in range(size)]
    store = client(port)
    channel = CollectiveChannel(
        rank, size, store, name=name, names=names, device=device, timeout=20.0
    )
    return RowBroadcast(channel, giver="t0", content=content, device=device)


def broadcast_all(
    rank: int, port: int, size: int, content: bool = False, kind: str = "cpu"
) -> list[Any]:
    """Rank 0 sends everything; the others return whether they got the same, and how many bytes.
    kind: of devices, of which each rank has its own.
    """
    device = kind if kind == "cpu" else f"{kind}:{rank}"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    ends = cast_of(rank, size, port, f"given {size} {content} {kind}", content, device)
    said: list[Any] = []
    for inputs in rows():
        if rank == 0:
            ends.give(inputs)
            continue
        taken = ends.take(list(inputs))
        said.append(list(taken) == list(inputs))
        said += [equal_batch(given, taken[name]) for name, given in inputs.items()]
    moved = ends.take_moved_bytes()
    ends.close()
    return [*said, moved, ends.take_moved_bytes()]


@pytest.mark.parametrize(("size", "content"), [(2, False), (3, False), (2, True)])
def test_rows_arrive_to_the_bit(ranks: RankPool, size: int, content: bool) -> None:
    giver, *others = ranks.do(size, broadcast_all, size, content)
    assert giver == [0, 0], "nothing comes to the rank that gives"
    large = rows()[4]["large"].nbytes
    for *comparisons, moved, again in others:
        assert len(comparisons) == len(rows()) + sum(len(inputs) for inputs in rows())
        assert all(each is True for each in comparisons)
        assert large <= moved < 1.1 * large
        assert again == 0


def changed(rank: int, port: int) -> str:
    """Rank 0 sends a device column whose hash is not the announced one."""
    ends = cast_of(rank, 2, port, "changed", content=True)
    inputs = {"hidden": on_devices()}
    if rank == 0:
        wrong = lambda tensors: [n ^ 1 for n in of_tensors(tensors)]
        with mock.patch("engine.channels.tensors.row_broadcast.of_tensors", wrong):
            ends.give(inputs)
        return ""
    with pytest.raises(RunError) as error:
        ends.take(list(inputs))
    return str(error.value)


def test_values_that_were_changed_on_their_way_are_refused_where_content_is_checked(
    ranks: RankPool,
) -> None:
    assert (
        "t0: refused the rows that it gives: columns on a device whose values were"
        in ranks.do(2, changed)[1]
    )


LIES = {
    "another number": "found rows 2 of 2",
    "too few inputs": "found rows 1 of 1",
    "a changed byte": "was changed on its way",
    "no header": "checksum is wrong",
    "a long header": "1099511627776",
    "no numbers": "found TensorLayout(name='x', dtype='load'",
    "too much": "expected at most 68719476736",
}
"""Each with what is said of it."""


def lying(lie: str) -> list[list[torch.Tensor]]:
    """The tensors of each broadcast of a sender that tells this lie."""
    headers, frames = [], []
    for number in range(1 if lie == "too few inputs" else 2):
        header, buffers = frame_block(number, batch(Reward, 5, 3).records)
        headers.append(header)
        frames += buffers
    shape = [1 << 30, 99] if lie == "too much" else [1]
    kind = "load" if lie == "no numbers" else "float32"
    headers[-1] = replace(headers[-1], tensors=[TensorLayout("x", kind, shape)])
    number = 2 if lie == "another number" else 1
    reply = bytearray(seal_message(Reply(number, add_checksums(headers, frames))))
    reply[20] ^= lie == "no header"
    data = [np.frombuffer(frame, np.uint8).copy() for frame in frames]
    data[-1][0] ^= 1
    length = 1 << 40 if lie == "a long header" else len(reply)
    return [
        [torch.tensor([length])],
        [torch.frombuffer(reply, dtype=torch.uint8)],
        [*map(torch.from_numpy, data)],
        [torch.zeros(1)],
    ]


def lies(rank: int, port: int) -> list[str]:
    """Rank 0 lies, each time in another world; returns rank 1's errors, and the end of rank 0."""
    said = []
    for lie in LIES:
        names = ["t0", "t1"]
        channel = CollectiveChannel(rank, 2, client(port), name=lie, names=names, timeout=20.0)
        try:
            if rank == 1:
                RowBroadcast(channel, giver="t0").take(["a", "b"])
            else:
                for number, tensors in enumerate(lying(lie)):
                    channel.broadcast(0, number, tensors)
            said.append("nothing")
        except RunError as error:
            said.append(f"{type(error).__name__}: {error}")
        channel.close()
    return said


def test_what_cannot_be_right_is_refused_and_the_giver_is_told(ranks: RankPool) -> None:
    first, second = ranks.do(2, lies)
    for (lie, wanted), giver, taker in zip(LIES.items(), first, second, strict=True):
        assert taker.startswith("RunError: t0: refused the rows that it gives"), lie
        assert wanted in taker, lie
        assert lie == "a changed byte" or "did not end" in giver, lie


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_rows_go_from_device_to_device(ranks: RankPool, size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    _, *others = ranks.do(size, broadcast_all, size, False, "cuda")
    for *comparisons, _, _ in others:
        assert all(each is True for each in comparisons)


def joins(rank: int, port: int) -> str:
    """Rank 1 waits for rows, and rank 0 does nothing."""
    ends = cast_of(rank, 2, port, "joins")
    client(port).set(f"joined {rank}", "1")
    if rank == 0:
        threading.Event().wait()
    with pytest.raises(PeerLost) as error:
        ends.take(["a"])
    return str(error.value)


def test_a_giver_that_is_killed_leaves_nobody_waiting(ranks: RankPool) -> None:
    for rank in (0, 1):
        ranks.tell(rank, joins)
    ranks.store.wait(["joined 1", "joined 0"], timedelta(seconds=30))
    ranks.signal(0, signal.SIGKILL)
    (told,) = ranks.answers([1])
    assert "t0: broadcast 0 with t1 did not end" in str(told)
