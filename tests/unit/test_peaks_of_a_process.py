"""What a Worker's process says of its memory between two heartbeats."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from engine.run.control import control, wire
from engine.run.control.control_socket import ControlSocket
from engine.run.worker_process.worker_process import WorkerProcess


def test_an_instruction_that_needed_more_tells_it_before_the_next_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, theirs = socket.socketpair()
    opened = control.Open(worker="w", epoch=0, plan=b"", outbox=1 << 20)
    life = WorkerProcess(ControlSocket(theirs), opened, ())
    life._worker = SimpleNamespace(reports=list, timing=SimpleNamespace(computed=0.0))
    for peak in (100 << 20, 100 << 20, 900 << 20):
        monkeypatch.setattr("engine.run.worker.counters._peak", lambda peak=peak: peak)
        life._flush()
    life._channel.channel.close()
    theirs.close()
    assert told_peaks(ControlSocket(mine)) == [100 << 20, 900 << 20]
    mine.close()


def told_peaks(link: ControlSocket) -> list[float]:
    """In the order of their frames."""
    peaks: list[float] = []
    while (frames := link.receive()) is not None:
        for update in (wire.decode_message(frame.payload) for frame in frames):
            if isinstance(update, control.WorkerUpdate):
                peaks += [value for name, value, _ in update.reports if name == "flow/peak/w"]
    return peaks
