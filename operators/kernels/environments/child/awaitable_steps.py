"""Functions of a user's, some of which may have to be awaited, one after another.

Owns: running them in the calling thread as long as nothing is to be awaited, so that one that
blocks holds nobody else up where episodes share a loop. Does not own: threads (shared.py).

A generator yields what may be awaitable, and gets what that came to.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def complete(steps: Generator[Any, Any, T]) -> T | Awaitable[T]:
    """Run a generator to its end: what it returns, or an awaitable of it from the first yield on
    that has to be awaited.
    """
    returned: Any = None
    while True:
        try:
            returned = steps.send(returned)
        except StopIteration as stop:
            return stop.value
        if inspect.isawaitable(returned):
            return _await_rest(steps, returned)


async def _await_rest(steps: Generator[Any, Any, T], pending: Any) -> T:
    while True:
        go_on = await _settle(steps, pending)
        try:
            pending = go_on()
        except StopIteration as stop:
            return stop.value


async def _settle(steps: Generator[Any, Any, Any], pending: Any) -> Callable[[], Any]:
    """The generator's next step, with what was awaited, or with what that raised."""
    if not inspect.isawaitable(pending):
        return functools.partial(steps.send, pending)
    try:
        returned = await pending
    except Exception as error:  # raised again where the generator waits for it
        return functools.partial(steps.throw, error)
    return functools.partial(steps.send, returned)
