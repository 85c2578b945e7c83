"""Streams of the page: a client gets the newest of each kind, and no more than its share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from engine.watch.pace import Pace
from engine.watch.stream import SILENCE, Feeds, RunFeed, event


class Clock:
    """Time that passes by a step at each look at it."""

    def __init__(self, step: float) -> None:
        self.now, self._step = 0.0, step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


async def never() -> bool:
    return False


def taken(feeds: Feeds, look: Callable[[], dict[str, Any]], count: int) -> list[bytes]:
    """The first parts of a run's stream."""

    async def read() -> list[bytes]:
        events, found = feeds.events("a", look, never), list[bytes]()
        async for each in events:
            found.append(each)
            if len(found) == count:
                break
        await events.aclose()  # type: ignore[attr-defined]
        assert feeds.clients == 0
        return found

    return asyncio.run(read())


def test_a_slow_client_gets_the_newest_of_each_kind() -> None:
    feed, seen = RunFeed(look=dict), dict[str, int]()
    for step in range(100):
        feed.take({"step": {"step": step}, "flow": {"x": step // 50}})
    told = []
    while (kind := feed.due(seen)) is not None:
        seen[kind] = feed.version[kind]
        told.append(feed.newest[kind])
    assert told == [event("step", {"step": 99}), event("flow", {"x": 1})]
    feed.take({"step": {"step": 99}})
    assert feed.due(seen) is None
    assert len(feed.newest) == 2


def test_a_stream_begins_with_how_soon_to_come_back() -> None:
    looks = iter(range(1000))
    parts = taken(Feeds(), lambda: {"step": {"step": next(looks)}}, 3)
    assert parts[0] == b"retry: 1000\n\n"
    steps = [json.loads(part.partition(b"data: ")[2])["step"] for part in parts[1:]]
    assert steps == sorted(set(steps))


def test_a_client_that_gets_nothing_gets_a_comment() -> None:
    parts = taken(Feeds(Clock(SILENCE / 2)), dict, 3)
    assert parts[1:] == [b": still here\n\n"] * 2


def test_an_event_that_is_larger_than_a_seconds_share_is_paid_for() -> None:
    now, sent = 0.0, 0
    pace = Pace(lambda: now)
    for tick in range(1000):
        now = tick / 10
        if pace.may_send():
            pace.count_sent(100_000)
            sent += 1
    assert sent == 50
