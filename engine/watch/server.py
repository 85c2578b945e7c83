"""The server's life: its socket on loopback, its URL, and what ends it.

Owns: that it listens on 127.0.0.1 alone, ends with open streams, and ends after the run that it was
started with. Does not own: its answers (app.py).

Alone it serves until Ctrl-C, SIGTERM or SIGHUP. Started with a run, it ends as soon as the run's
process is gone, which its standard input tells by its end, however that process ended; but while
pages are open it stays for them, at most LINGER seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import uvicorn

from dataflow.errors import RunError
from dataflow.signals import STOPS, is_ignored, leave_signals_to_the_run
from engine.watch.app import application
from engine.watch.guard import Guard, new_token
from engine.watch.run_questions import ServedRuns
from engine.watch.stream import Feeds

HOST = "127.0.0.1"
LINGER = 900.0
"""Seconds for which open pages keep the server of a run that has ended."""
_GRACE = 5.0
"""Seconds in which a page that is loaded anew comes back."""
_TICK = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is served. first: runs that the page opens; with_run: until standard input ends; token:
    a new one unless it is given.
    """

    root: Path
    first: Sequence[str] = ()
    port: int = 0
    with_run: bool = False
    token: str = ""


def serve(serving: Serving, tell: Callable[[str], None]) -> None:
    """Serve until something ends it. tell: gets the URL, once. Raises RunError, OSError."""
    served, feeds = ServedRuns(serving.root), Feeds()
    with _listen(serving.port) as listening:
        port = listening.getsockname()[1]
        token = serving.token or new_token()
        if serving.first:
            first = f"/#{quote(','.join(serving.first))}"
        else:
            first = "/"
        guard = Guard(application(served, feeds), token=token, port=port, first=first)
        server = PageServer(_config(guard), feeds, with_run=serving.with_run)
        tell(f"http://{HOST}:{port}/?token={token}")
        asyncio.run(_serve_until_end(server, listening, serving.with_run))


def serve_beside_run(root: str, name: str) -> None:
    """Serve while the run that started this process goes on."""
    serving = Serving(root=Path(root), first=(name,), with_run=True)
    serve(serving, lambda url: print(url, flush=True))


def _listen(port: int) -> socket.socket:
    """Bound to loopback. Raises RunError for a port that is taken."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        fix = "another --port, or 0 for any"
        raise RunError(f"port {port} on {HOST}: {error.strerror}. Fix: {fix}.") from error
    return listening


def _config(guard: Guard) -> uvicorn.Config:
    return uvicorn.Config(
        guard,
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        ws="none",
        http="h11",
        h11_max_incomplete_event_size=1 << 16,
        limit_concurrency=64,
        timeout_graceful_shutdown=2,
    )


class PageServer(uvicorn.Server):
    """Ends its streams first as it shuts down. with_run: stop signals are the run's."""

    def __init__(self, config: uvicorn.Config, feeds: Feeds, *, with_run: bool) -> None:
        super().__init__(config)
        self.feeds = feeds
        self._with_run = with_run

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop signals end the server, except beside a run."""
        if self._with_run:
            leave_signals_to_the_run()
            yield
            return
        before = {n: signal.signal(n, self.handle_exit) for n in STOPS if not is_ignored(n)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def end(self) -> None:
        """Let it shut down soon."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close everything; streams have ended within a moment."""
        self.feeds.end()
        await super().shutdown(sockets)


async def _serve_until_end(server: PageServer, listening: socket.socket, with_run: bool) -> None:
    if with_run:
        watching = asyncio.create_task(_end_after_run(server))
        # However it ended: nobody else ends this process.
        watching.add_done_callback(lambda _: server.end())
    else:
        watching = None
    try:
        await server.serve(sockets=[listening])
    finally:
        if watching is not None:
            watching.cancel()


async def _end_after_run(server: PageServer) -> None:
    """Wait until the run's process has ended, and nobody needs the server any more."""
    await _input_ended()
    open_pages = server.feeds.clients
    if open_pages:
        pages = "its page stays" if open_pages == 1 else f"its {open_pages} pages stay"
        with suppress(OSError):  # the run's terminal may be gone with it
            print(f"the run has ended; {pages} until closed", file=sys.stderr, flush=True)
    _leave_the_terminal()
    for number in STOPS:
        signal.signal(number, server.handle_exit)
    end = time.monotonic() + LINGER
    while time.monotonic() < end and not server.should_exit:
        seconds_alone = time.monotonic() - server.feeds.left_at
        is_reloading = bool(open_pages) and seconds_alone < _GRACE
        if not (server.feeds.clients or is_reloading):
            break
        await asyncio.sleep(_TICK)


async def _input_ended() -> None:
    """Wait until the other end of standard input is closed."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            ended.set()

    loop.add_reader(0, read)
    await ended.wait()


def _leave_the_terminal() -> None:
    """Nobody waits for our output any more: whoever reads the run's must see its end."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
