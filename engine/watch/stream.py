"""Server-sent events of one run: its state, its Steps, its last seconds.

Owns: which events there are, their order, and that a slow client gets the newest of each kind and
no queue. Does not own: how much a client gets (pace.py), the files
(engine/keep/reader/flow_index.py).

The files of a run are looked at as long as a client is there, at most POLLS_A_SECOND times a
second, by one feed for all clients of the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from engine.watch.json_answers import encode_answer
from engine.watch.pace import Pace

POLLS_A_SECOND = 5.0
SILENCE = 10.0
"""Seconds after which a client that got nothing gets a comment, which tells whether it is there."""
KINDS = ("state", "step", "flow")
"""In the order in which they are sent, if several are due."""
RETRY = b"retry: 1000\n\n"

Look = Callable[[], dict[str, Any]]
"""The newest of each kind that there is; called in a thread."""


@dataclass(slots=True)
class RunFeed:
    """The newest events of one run. version: of each kind, how often it has changed."""

    look: Look
    newest: dict[str, bytes] = field(default_factory=dict)
    version: dict[str, int] = field(default_factory=dict)
    clients: int = 0
    task: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def poll(self) -> None:
        """Look at the files until nobody listens."""
        while self.clients:
            self.take(await asyncio.to_thread(self.look))
            await asyncio.sleep(1.0 / POLLS_A_SECOND)

    def take(self, newest: dict[str, Any]) -> None:
        """Keep what differs from what was there."""
        for kind, content in newest.items():
            message = event(kind, content)
            if self.newest.get(kind) != message:
                self.newest[kind] = message
                self.version[kind] = self.version.get(kind, 0) + 1
        # A new one before the old one is set: whoever wakes waits for the next change.
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def due(self, seen: dict[str, int]) -> str | None:
        """The first kind of which a client has not seen the newest."""
        for kind in KINDS:
            if self.version.get(kind, 0) > seen.get(kind, 0):
                return kind
        return None


class Feeds:
    """The feeds of all runs that have clients; `ended` once the server shuts down."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._feeds: dict[str, RunFeed] = {}
        self._ended = False
        self.left_at = clock()
        """When the last client of all went, or the server began."""

    @property
    def clients(self) -> int:
        """Clients of all runs."""
        return sum(feed.clients for feed in self._feeds.values())

    def end(self) -> None:
        """End all streams at their next turn."""
        self._ended = True

    async def events(
        self, name: str, look: Look, gone: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[bytes]:
        """The events of a run for one client, until it goes or the server does."""
        feed = self._feeds.setdefault(name, RunFeed(look=look))
        feed.clients += 1
        if feed.task is None or feed.task.done():
            feed.task = asyncio.create_task(feed.poll())
        try:
            yield RETRY
            async for each in self._of(feed, gone):
                yield each
        finally:
            feed.clients -= 1
            if not feed.clients:
                self._feeds.pop(name, None)
                if feed.task is not None:
                    feed.task.cancel()
            self.left_at = self._clock()

    async def _of(self, feed: RunFeed, gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[bytes]:
        """Send the newest of each kind, as fast as the client's pace allows."""
        pace = Pace(self._clock)
        sent_versions: dict[str, int] = {}
        last = self._clock()
        while not self._ended and not await gone():
            kind = feed.due(sent_versions)
            if kind is not None and pace.may_send():
                sent_versions[kind] = feed.version[kind]
                message = feed.newest[kind]
                pace.count_sent(len(message))
                last = self._clock()
                yield message
            elif self._clock() - last >= SILENCE:
                last = self._clock()
                yield b": still here\n\n"
            else:
                await self._turn(feed)

    async def _turn(self, feed: RunFeed) -> None:
        """Wait for a change, or until the pace may allow what is due."""
        if feed.task is not None and feed.task.done():
            feed.task.result()  # raises what ended it: nothing would come any more
        waiting = asyncio.create_task(feed.changed.wait())
        await asyncio.wait([waiting], timeout=1.0 / POLLS_A_SECOND)
        waiting.cancel()


def event(kind: str, content: Any) -> bytes:
    """One event; its JSON has no line ends."""
    return b"event: " + kind.encode() + b"\ndata: " + encode_answer(content) + b"\n\n"
