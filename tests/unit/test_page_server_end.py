"""A page's server beside a run ends with the run, whatever goes wrong as it does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.watch import server as page_server
from engine.watch.app import application
from engine.watch.guard import Guard
from engine.watch.run_questions import ServedRuns
from engine.watch.stream import Feeds

SOON = 20.0

pytestmark = pytest.mark.timeout(60)


class GoneTerminal:
    """Standard error of a terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")

    def flush(self) -> None:
        raise OSError(5, "Input/output error")


async def no_input() -> None:
    """The run has ended."""


async def fail(server: page_server.PageServer) -> None:
    raise ValueError("nobody expects this")


@pytest.mark.parametrize("what", ["its terminal is gone", "nobody knows"])
def test_a_server_ends_after_its_run_though_that_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    for name in ("leave_signals_to_the_run", "_leave_the_terminal"):
        monkeypatch.setattr(page_server, name, lambda: None)
    monkeypatch.setattr(page_server, "STOPS", ())
    monkeypatch.setattr(page_server, "LINGER", 0.0)
    monkeypatch.setattr(page_server, "_input_ended", no_input)
    if what == "nobody knows":
        monkeypatch.setattr(page_server, "_end_after_run", fail)
    monkeypatch.setattr("sys.stderr", GoneTerminal())
    monkeypatch.setattr(Feeds, "clients", 1)
    feeds = Feeds()
    with page_server._listen(0) as listening:
        guard = Guard(application(ServedRuns(tmp_path), feeds), token="t", port=1, first="/")
        server = page_server.PageServer(page_server._config(guard), feeds, with_run=True)
        serving = page_server._serve_until_end(server, listening, True)
        asyncio.run(asyncio.wait_for(serving, SOON))
    assert server.should_exit
