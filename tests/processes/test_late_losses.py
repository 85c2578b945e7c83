"""A Worker whose peers know that it is gone before its process has ended."""

from __future__ import annotations

import selectors
import threading
from collections.abc import Sequence
from functools import partial

import pytest

from engine.protocol import messages as m
from engine.run.launch.child import ChildProcess
from engine.run.launch.supervisor import Supervisor
from engine.run.launch.worker_io import WorkerIO
from engine.run.loop.loop import Loop
from tests.kit import run_graphs
from tests.kit.processes import ended, kill, workers
from tests.kit.runs import metrics, timeless
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(120)


def test_a_loss_that_is_told_after_all_are_idle_is_waited_for(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maker of rows dies idle, and its end is held back until nobody has anything to do."""
    all_idle = threading.Event()
    killed: list[int] = []
    hear, on_end, on_link = Loop._hear, WorkerIO._on_end, WorkerIO._on_link
    next_while_idle = Supervisor.next_while_idle

    def kill_first(self: Loop, messages: Sequence[m.Event | m.From]) -> None:
        events = [getattr(message, "event", message) for message in messages]
        is_made = any(isinstance(e, m.ChunkDone) and e.node == "rollout" for e in events)
        if is_made and not killed:
            killed.append(workers()["rollout"])
            kill(killed)
            assert ended(killed[0], 20.0)
        hear(self, messages)

    def is_held_back(child: ChildProcess) -> bool:
        return child.process.pid in killed and not all_idle.is_set()

    def on_late_end(
        self: WorkerIO, selector: selectors.BaseSelector, child: ChildProcess, events: int
    ) -> None:
        if not is_held_back(child):
            on_end(self, selector, child, events)

    def on_open_link(
        self: WorkerIO, selector: selectors.BaseSelector, child: ChildProcess, events: int
    ) -> None:
        if is_held_back(child):
            self._read(child)
        else:
            on_link(self, selector, child, events)

    def note_idle(self: Supervisor, timeout: float) -> m.Event | m.From | None:
        all_idle.set()
        return next_while_idle(self, timeout)

    graph = partial(run_graphs.small, max_lag=0)
    whole = tiny.run(graph, 2, name="whole", workers="apart")
    monkeypatch.setattr(Loop, "_hear", kill_first)
    monkeypatch.setattr(WorkerIO, "_on_end", on_late_end)
    monkeypatch.setattr(WorkerIO, "_on_link", on_open_link)
    monkeypatch.setattr(Supervisor, "next_while_idle", note_idle)
    result = tiny.run(graph, 2, workers="apart")
    assert killed
    assert all_idle.is_set()
    assert timeless(metrics(result)) == timeless(metrics(whole))
