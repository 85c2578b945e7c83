"""A run's part on a host: what goes wrong there is an error of the run, whatever it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import RunError
from engine.keep.run_folder import RunFolder
from engine.plan.options import RunOptions, encode_options
from engine.run.control import control, wire
from engine.run.control import host_messages as hm
from engine.run.hosts.desk import Desk
from engine.run.hosts.host import HostedRun
from engine.run.hosts.numbered_messages import Arrived, ToSend

pytestmark = pytest.mark.timeout(60)
MOST_CALLS = 20
"""Each of which waits a moment for something to be said."""


def make_begin(folder: Path, plan: bytes) -> hm.Begin:
    return hm.Begin(
        plan=plan,
        folder=folder,
        directory=Path.cwd(),
        planned="",
        path=(),
        networks=(),
        absent={},
        lease=30.0,
        options=encode_options(RunOptions()),
    )


def hear_all(desk: Desk) -> Iterator[Any]:
    """What the host says to the run."""
    arrived = Arrived()
    for _ in range(MOST_CALLS):
        _, _, first, frames, _ = desk.answer(arrived.count, 0.0)
        yield from map(wire.decode_message, arrived.take(first, frames))
    raise AssertionError("the host says nothing")


def test_a_plan_that_cannot_be_read_there_ends_the_run(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a package is missing on that host."""
    monkeypatch.setattr(HostedRun, "_folder", lambda self, begin: run_folder)
    desk, of_run = Desk(), ToSend()
    part = threading.Thread(target=HostedRun(desk, "far", "127.0.0.1").run, daemon=True)
    part.start()
    unreadable = b"cno_such_package\nits_function\n."
    of_run.add(wire.encode_message(make_begin(run_folder.path, unreadable)))
    desk.accept(*of_run.take())
    said = hear_all(desk)
    failed = next(said)
    assert isinstance(failed, control.Failed)
    error = failed.error()
    assert isinstance(error, RunError)
    assert "host far: expected that it can carry out its part" in str(error)
    assert "ModuleNotFoundError: No module named 'no_such_package'. Fix: " in str(error)
    of_run.add(wire.encode_message(control.Quit()))
    desk.accept(*of_run.take())
    assert next(said) == hm.HostEnded()
    desk.answer(2, 0.0)
    part.join()
    desk.close()
