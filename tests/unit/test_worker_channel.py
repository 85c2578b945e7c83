"""A Worker's channel, made from its instructions."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pyarrow as pa
import pytest

from dataflow.batch import Batch, Keys
from dataflow.errors import RunError
from engine.channels.contract import BlockRequest
from engine.launch.control import Open
from engine.launched.worker_channel import WorkerChannel, worker_channel

Verify = Literal["structure", "content"]


@contextmanager
def two_workers(verify: Verify) -> Iterator[tuple[WorkerChannel, WorkerChannel]]:
    """Two Workers on one host; the second reads from the first."""
    ends = socket.socketpair()
    a, b = (
        worker_channel(
            Open(worker=w, epoch=0, plan=b"", outbox=1 << 22, verify=verify), lambda _: ends[1]
        )
        for w in "ab"
    )
    a.shm.serve("b", ends[0])
    yield a, b
    for each in (a, b):
        each.pairs.close()
        each.channel.close()


@pytest.mark.parametrize("verify", ["structure", "content"])
def test_content_is_checked_where_that_was_asked_for(verify: Verify) -> None:
    records = pa.RecordBatch.from_pydict({"x": pa.array([1, 2, 3])})
    with two_workers(verify) as (a, b):
        block = a.channel.keep(Batch(Keys.of(range(3)), records))
        a.shm._pool._slabs[0].bytes(0, 1)[0] = 5  # whoever kept a batch may not change it any more
        if verify == "structure":
            assert b.channel.fetch([BlockRequest(worker="a", block=block)])[0].column(
                "x"
            ).to_pylist() == [5, 2, 3]
            return
        with pytest.raises(RunError, match="its content is not what its owner kept"):
            b.channel.fetch([BlockRequest(worker="a", block=block)])
