"""Memory that runs out: blocks go to unnamed files, this is reported, and less is admitted."""

from __future__ import annotations

import os
import socket

import numpy as np
import pyarrow as pa
import pytest

from dataflow.batch import Batch, Keys
from engine.channels.shm.channel import ShmChannel
from engine.coordinator.admission import Admission
from engine.coordinator.blocks import Blocks
from engine.coordinator.messages import From, Spilled, WorkerLost
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.recovery import Recovery
from engine.launch.control import WorkerUpdate
from engine.launch.control_socket import ControlSocket
from engine.launch.wire import decode
from engine.launched.updates import Updates
from engine.plan.plan import PlannedSource
from tests.kit.plans import planned_node

MIB = 1 << 20


def megabytes(count: int) -> Batch:
    column = pa.array([np.ones(count * MIB // 8)])
    return Batch(Keys.of([0]), pa.RecordBatch.from_pydict({"x": column}))


def test_what_is_beyond_the_limit_lies_in_unnamed_files_until_it_is_released(tmp_path) -> None:
    nobody = lambda _: pytest.fail("nobody is asked")
    channel = ShmChannel("a", 0, nobody, limit=12 * MIB, directory=tmp_path)
    blocks = [channel.keep(megabytes(4)) for _ in range(4)]
    assert channel.spilled > 0
    assert os.listdir(tmp_path) == []
    for block in blocks:
        channel.release(block)
    assert channel.spilled == 0
    channel.close()


def spilled(nbytes: int, number: int, worker: str = "w", epoch: int = 0) -> From:
    event = Spilled(worker=worker, nbytes=nbytes)
    return From(worker=worker, epoch=epoch, number=number, event=event)


def test_a_worker_spills_until_it_says_that_it_does_not_or_is_gone() -> None:
    workers = Recovery(["w", "v"])
    list(workers.in_order(spilled(5, 0)))
    list(workers.in_order(spilled(5, 0, worker="v")))
    list(workers.in_order(spilled(0, 1)))
    assert workers.spilling
    list(workers.in_order(spilled(7, 1)))  # once more, and wrong
    workers.lost(WorkerLost(worker="v", epoch=0, error="killed"))
    assert not workers.spilling
    list(workers.in_order(spilled(3, 1, worker="v")))  # from beyond the grave
    assert not workers.spilling


@pytest.mark.parametrize("max_lag", [0, 2])
def test_while_an_outbox_spills_no_more_than_one_batch_is_outstanding(max_lag) -> None:
    source = planned_node("prompts", work="source", relation="source", source="p")
    table = PromptTable("p", (source,), ["prompts"], Blocks())
    planned = PlannedSource(name="p", batch=4, max_lag=max_lag)
    admission = Admission(planned, table, steps=9)
    assert sum(len(ready.keys) for ready in admission.admit(0, sparing=True)) == 4
    assert admission.admit(0, sparing=True) == []
    assert sum(len(ready.keys) for ready in admission.admit(0)) == 4 * max_lag
    assert admission.admit(0, sparing=True) == []


def test_a_worker_tells_when_it_begins_to_spill_and_when_it_ends() -> None:
    mine, its = socket.socketpair()
    link, other = ControlSocket(mine), ControlSocket(its)
    out = Updates(link, "w", 3)
    changes = [out.spilled(lambda n=n: n) for n in (0, 5, 9, 0, 0)]
    assert changes == [False, True, False, True, False]
    out.flush()
    frames = other.receive()
    assert frames is not None
    (told,) = [decode(frame.payload, (WorkerUpdate,)) for frame in frames]
    assert [e.event for e in told.events] == [Spilled(worker="w", nbytes=n) for n in (5, 0)]
    assert [e.number for e in told.events] == [0, 1]
    link.close()
    other.close()
