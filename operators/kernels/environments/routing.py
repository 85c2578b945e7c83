"""Several pools of environments as one: a dataset column names the pool of each episode.

Owns: which pool an episode runs in, waiting for all of them at once. Does not own: the pools, their
time limits (pool.py).

    waits for                              unblocked by
    a descriptor of any pool               its processes; the pool's next deadline
"""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from dataflow.errors import DataError
from dataflow.prompt_types import Message
from operators.environments import EnvironmentsByColumn
from operators.kernels.environments.replies import EnvironmentPool, EnvironmentReply
from operators.kernels.environments.wake_up import WakeUp


@runtime_checkable
class SelectablePool(Protocol):
    """A pool whose replies come later, and that others can wait for, too."""

    def fileno(self) -> int:
        """A descriptor that is readable when `wait(0)` has something to do."""
        ...

    def seconds_left(self) -> float:
        """Until `wait(0)` has something to do though no descriptor says so: the next deadline."""
        ...


class RoutedPool:
    """See EnvironmentPool. name: of the node, for messages. pools: by the kinds' names; this one
    closes them. One that is not selectable has its replies at once.
    """

    def __init__(
        self,
        environment: EnvironmentsByColumn,
        pools: Mapping[str, EnvironmentPool],
        *,
        name: str,
    ) -> None:
        self._environment = environment
        self._pools = dict(pools)
        self._name = name
        self._routes: dict[int, EnvironmentPool] = {}
        """Of the episodes under way."""
        self._calling: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_up = WakeUp()
        self._selector.register(self._wake_up, selectors.EVENT_READ)
        self._is_closed = False
        self._selectable: list[SelectablePool] = []
        for pool in self._pools.values():
            if isinstance(pool, SelectablePool):
                self._selectable.append(pool)
                self._selector.register(pool.fileno(), selectors.EVENT_READ)

    def reset(self, episode: int, seed: int, row: Mapping[str, Any]) -> None:
        """See EnvironmentPool. Raises DataError where the row names no kind."""
        column = self._environment.column
        kind = row.get(column)
        pool = self._pools.get(kind) if isinstance(kind, str) else None
        if pool is None:
            kinds = ", ".join(self._pools)
            raise DataError(
                f"environment {self._name!r}: expected {column!r} to be one of {kinds}, found"
                f" {kind!r:.60}. Fix: a kind of this name in environments_by, or other data."
            )
        columns = dict(row)
        if column not in self._environment.kinds[str(kind)].columns:
            del columns[column]
        pool.reset(episode, seed, columns)
        self._routes[episode] = pool
        self._calling.add(episode)

    def step(self, episode: int, message: Message) -> None:
        """See EnvironmentPool."""
        self._routes[episode].step(episode, message)
        self._calling.add(episode)

    def finish(self, episode: int, reason: str) -> None:
        """See EnvironmentPool."""
        self._routes[episode].finish(episode, reason)
        self._calling.add(episode)

    def abandon(self, episode: int, reason: str | None = None) -> None:
        """See EnvironmentPool."""
        pool = self._routes.pop(episode, None)
        self._calling.discard(episode)
        if pool is not None:
            pool.abandon(episode, reason)

    def wait(self, seconds: float | None) -> list[EnvironmentReply]:
        """See EnvironmentPool. With no call under way, None returns at once."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            replies = self._take()
            until_end = end - time.monotonic()
            is_woken = self._wake_up.clear()
            has_nothing = seconds is None and not self._calling
            if replies or is_woken or has_nothing or until_end <= 0.0:
                return replies
            self._select(until_end)

    def _take(self) -> list[EnvironmentReply]:
        """What all pools have, in the order of the kinds."""
        replies: list[EnvironmentReply] = []
        for pool in self._pools.values():
            replies += pool.wait(0)
        for reply in replies:
            self._calling.discard(reply.episode)
            if reply.fault is not None or reply.call == "finish":
                self._routes.pop(reply.episode, None)
        return replies

    def _select(self, until_end: float) -> None:
        """Wait until a pool has something to do."""
        deadlines = [pool.seconds_left() for pool in self._selectable]
        seconds = max(0.0, min([until_end, *deadlines]))
        self._selector.select(None if seconds == math.inf else seconds)

    def wake(self) -> None:
        """See EnvironmentPool."""
        self._wake_up.wake()

    def close(self) -> None:
        """See EnvironmentPool."""
        if self._is_closed:
            return
        self._is_closed = True
        self._selector.close()
        self._wake_up.close()
        for pool in self._pools.values():
            pool.close()
