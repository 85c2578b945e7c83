"""Pools of environments, opened and asked one thing after another."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from operators.environments import isolated
from operators.kernels.environments.in_process import InProcessPool
from operators.kernels.environments.pool import ProcessPool
from operators.kernels.environments.replies import (
    EnvironmentFault,
    EnvironmentPool,
    EnvironmentReply,
)
from tests.kit.environment_classes import Obedient, message

SECONDS = 60.0
"""Within which a reply comes."""


@contextmanager
def opened(
    target: Any = Obedient, *, reset_timeout: float = 60.0, step_timeout: float = 60.0, **how: Any
) -> Iterator[ProcessPool]:
    """A pool of processes, closed afterwards. how: arguments of `isolated`."""
    environment = isolated(target, **how)
    pool = ProcessPool(
        environment, name="played", reset_timeout=reset_timeout, step_timeout=step_timeout
    )
    try:
        yield pool
    finally:
        pool.close()


@contextmanager
def opened_here(target: Any = Obedient) -> Iterator[InProcessPool]:
    """A pool in this process, closed afterwards."""
    pool = InProcessPool(isolated(target), name="played")
    try:
        yield pool
    finally:
        pool.close()


def replies(pool: EnvironmentPool, count: int) -> dict[int, EnvironmentReply]:
    """So many replies, by episode."""
    received: dict[int, EnvironmentReply] = {}
    end = time.monotonic() + SECONDS
    while len(received) < count:
        assert time.monotonic() < end, f"{len(received)} replies of {count} came"
        for reply in pool.wait(SECONDS):
            received[reply.episode] = reply
    return received


def begin(pool: EnvironmentPool, *episodes: int, seed: int = 7) -> dict[int, EnvironmentReply]:
    """Episodes reset at once, without a fault."""
    for episode in episodes:
        pool.reset(episode, seed, {"question": f"q{episode}", "unused": b"\x00"})
    begun = replies(pool, len(episodes))
    assert [reply.fault for reply in begun.values() if reply.fault] == []
    return begun


def step(pool: EnvironmentPool, episode: int, content: str) -> EnvironmentReply:
    """The reply to one message."""
    pool.step(episode, message(content))
    return replies(pool, 1)[episode]


def fault_of(reply: EnvironmentReply) -> EnvironmentFault:
    assert reply.fault is not None, reply
    return reply.fault


def finish(pool: EnvironmentPool, episode: int) -> EnvironmentReply:
    pool.finish(episode, "stop")
    return replies(pool, 1)[episode]


def contents(reply: EnvironmentReply) -> Sequence[str]:
    """The texts of a reply's messages."""
    return [each["content"] for each in reply.messages]
