"""A Worker's process that is asked to end in the moment in which it begins with something."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import cloudpickle
import pytest

from engine.protocol import messages as m
from engine.run.control import control, wire
from engine.run.control.control_socket import ControlSocket, Frame
from engine.run.worker_process.task_inbox import Inbox, Item
from engine.run.worker_process.worker_process import WorkerProcess
from tests.kit import host_plans

pytestmark = pytest.mark.timeout(60)
QUIT = Frame(payload=wire.encode_message(control.Quit()))


@pytest.fixture
def life() -> Iterator[WorkerProcess]:
    """Of a source; its control thread is this one."""
    mine, theirs = socket.socketpair()
    plan = cloudpickle.dumps(host_plans.plan())
    opened = control.Open(worker="source", epoch=0, plan=plan, outbox=1 << 20)
    process = WorkerProcess(ControlSocket(theirs), opened, ())
    yield process
    process._channel.channel.close()
    mine.close()
    theirs.close()


class QuitComesBehind(Inbox):
    """The control thread handles Quit between the end of `take` and the next line."""

    def __init__(self, life: WorkerProcess) -> None:
        super().__init__()
        self._life = life

    def take(self) -> Item | None:
        item = super().take()
        self._life._handle(QUIT)
        return item


def do_nothing(life: WorkerProcess) -> None:
    """In place of opening kernels, which would change this process."""


def test_nothing_is_begun_that_was_taken_as_the_end_came(
    life: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[m.ToWorker] = []
    monkeypatch.setattr(WorkerProcess, "_begin", do_nothing)
    monkeypatch.setattr(WorkerProcess, "_execute", lambda self, item: executed.append(item))
    life._inbox = QuitComesBehind(life)
    life._inbox.put(host_plans.chunk(1, range(4)))
    life.work()
    assert executed == []


def test_no_kernel_is_opened_once_the_end_has_come(
    life: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[WorkerProcess] = []
    monkeypatch.setattr(WorkerProcess, "_begin", lambda self: begun.append(self))
    life._handle(QUIT)
    life.work()
    assert begun == []
