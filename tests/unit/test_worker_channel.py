"""A Worker's channel, made from its instructions."""

from __future__ import annotations

import socket
from typing import Any

import pyarrow as pa
import pytest

from dataflow.batch import Batch, Keys
from dataflow.errors import RunError
from engine.channels.block_requests import encode
from engine.channels.contract import BlockRequest, PeerLost
from engine.channels.tensors.shared_memories import MemoryToken, SharedMemories
from engine.run.control.control import Open
from engine.run.worker_process.worker_channel import worker_channel


def test_memory_of_a_worker_that_is_gone_is_no_fault_of_the_run() -> None:
    """It is told apart from memory that cannot be mapped although its Worker is there."""
    ends = socket.socketpair()
    a, b = (
        worker_channel(Open(worker=w, epoch=0, plan=b"", outbox=1 << 22), lambda _: ends[1])
        for w in "ab"
    )
    a.shm.serve("b", ends[0])
    token = encode(MemoryToken(bytes(16), "host", "", 5, b"no handle"))
    memories = SharedMemories("b", b.shm.require_answer, place="host")
    with pytest.raises(RunError, match="weights of a: expected memory of 5 bytes"):
        memories.map_token("a", token)
    a.channel.close()
    with pytest.raises(PeerLost):
        memories.map_token("a", token)
    for each in (a, b):
        each.pairs.close()
        each.channel.close()


@pytest.mark.parametrize("verify", ["structure", "content"])
def test_content_is_checked_where_that_was_asked_for(verify: Any) -> None:
    """Of two Workers on one host the second reads from the first."""
    ends = socket.socketpair()
    a, b = (
        worker_channel(
            Open(worker=w, epoch=0, plan=b"", outbox=1 << 22, verify=verify), lambda _: ends[1]
        )
        for w in "ab"
    )
    a.shm.serve("b", ends[0])
    records = pa.RecordBatch.from_pydict({"x": pa.array([1, 2, 3])})
    asked = [BlockRequest(worker="a", block=a.channel.keep(Batch(Keys.of(range(3)), records)))]
    a.shm._pool._slabs[0].bytes(0, 1)[0] = 5  # whoever kept a batch may not change it any more
    if verify == "structure":
        (read,) = b.channel.fetch(asked)
        assert read.column("x").to_pylist() == [5, 2, 3]
    else:
        with pytest.raises(RunError, match="its content is not what its owner kept"):
            b.channel.fetch(asked)
    for each in (a, b):
        each.pairs.close()
        each.channel.close()
