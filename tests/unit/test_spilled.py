"""Memory that ran out: blocks are in files (test_slabs.py), this is reported, less is admitted."""

from __future__ import annotations

import socket

import pytest

from engine.coordinator.admission import Admission
from engine.coordinator.blocks import Blocks
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.recovery import Recovery
from engine.plan.planned_source import PlannedSource
from engine.protocol.messages import From, Spilled, WorkerLost
from engine.run.control.control import WorkerUpdate
from engine.run.control.control_socket import ControlSocket
from engine.run.control.wire import decode_message
from engine.run.worker_process.worker_updates import Updates
from tests.kit.plans import planned_node


def test_a_worker_spills_until_it_says_that_it_does_not_or_is_gone() -> None:
    workers = Recovery(["w", "v"])

    def hear(nbytes: int, number: int, worker: str = "w") -> bool:
        event = Spilled(worker=worker, nbytes=nbytes)
        list(workers.in_order(From(worker=worker, epoch=0, number=number, event=event)))
        return workers.spilling

    assert hear(5, 0)
    assert hear(5, 0, "v")
    assert hear(0, 1)
    assert hear(7, 1)  # once more, and wrong
    workers.note_lost(WorkerLost(worker="v", epoch=0, error="killed"))
    assert not workers.spilling
    assert not hear(3, 1, "v")  # from beyond the grave


@pytest.mark.parametrize("max_lag", [0, 2])
def test_while_an_outbox_spills_no_more_than_one_batch_is_outstanding(max_lag) -> None:
    source = planned_node("prompts", work="source", relation="source", source="p")
    table = PromptTable("p", (source,), ["prompts"], Blocks())
    admission = Admission(PlannedSource(name="p", batch=4, max_lag=max_lag), table, steps=9)
    assert sum(len(ready.keys) for ready in admission.admit(0, sparing=True)) == 4
    assert admission.admit(0, sparing=True) == []
    assert sum(len(ready.keys) for ready in admission.admit(0)) == 4 * max_lag
    assert admission.admit(0, sparing=True) == []


def test_a_worker_tells_when_it_begins_to_spill_and_when_it_ends() -> None:
    mine, its = socket.socketpair()
    link, other = ControlSocket(mine), ControlSocket(its)
    out = Updates(link, "w", 3)
    changes = [out.note_spill(lambda n=n: n) for n in (0, 5, 9, 0, 0)]
    assert changes == [False, True, False, True, False]
    out.flush()
    frames = other.receive()
    (update,) = [decode_message(frame.payload, (WorkerUpdate,)) for frame in frames]
    assert [(e.number, e.event.nbytes) for e in update.events] == [(0, 5), (1, 0)]
    link.close()
    other.close()
