"""An event loop that goes on between the calls of an environment, in a thread of its process.

Owns: that thread, one a process. Does not own: connections (adapters). A connection has to answer
its server's pings while the model writes, when no call of the environment is under way.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""By process id: a fork has none of its parent's threads."""
_lock = threading.Lock()


async def run_in_background(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in this process's background loop; a call that is cancelled cancels it."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _background_loop()))


def _background_loop() -> asyncio.AbstractEventLoop:
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = asyncio.new_event_loop()
            _loops[os.getpid()] = loop
            threading.Thread(target=loop.run_forever, name="environment", daemon=True).start()
        return loop
