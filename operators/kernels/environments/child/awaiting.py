"""Calls that run one after another, with an event loop for what can be awaited.

Owns: that loop. Does not own: the calls (calls.py), episodes that share a loop (shared.py).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .calls import Calls


class SerialCalls:
    """Runs calls in this thread. The event loop is made with the first awaitable, and stays: what
    an environment opened in it can be used in the next call.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: ThreadPoolExecutor | None = None
        """For awaitables, where this thread already runs a loop, as in a notebook."""

    def run(self, calls: Calls) -> dict[str, Any]:
        """What the calls come to. Raises what they raise."""
        returned = None
        while True:
            try:
                function = calls.send(returned)
            except StopIteration as stop:
                return stop.value
            returned = function()
            if inspect.isawaitable(returned):
                returned = self._await(returned)

    def close(self) -> None:
        """End the event loop, if there is one."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._loop is not None:
            self._loop.close()

    def _await(self, returned: Awaitable[Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        if self._thread is None and asyncio._get_running_loop() is not None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="environment")
        if self._thread is not None:
            return self._thread.submit(self._complete, self._loop, returned).result()
        return self._complete(self._loop, returned)

    @staticmethod
    def _complete(loop: asyncio.AbstractEventLoop, returned: Awaitable[Any]) -> Any:
        return loop.run_until_complete(_as_coroutine(returned))


async def _as_coroutine(returned: Awaitable[Any]) -> Any:
    return await returned
