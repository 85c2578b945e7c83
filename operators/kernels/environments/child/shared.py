"""Episodes that share a process: objects in one event loop, for environments that wait for servers.

Owns: the loop, each episode's thread, giving an episode up. Does not own: what is called
(calls.py), the process (template.py).

Each episode has a thread, in which all its functions are called, so that one that blocks holds
nobody else up, and what may only be used by the thread that made it (a connection of sqlite3, a
browser of Playwright) works. What they return is awaited in the loop, where it can be: the calls of
coroutines of all episodes run there together. Global generators are not seeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .calls import Calls, CallTimer, EpisodeCalls
from .faults import format_user_frames, note_error
from .frames import FrameStream, pack_frame

_READ = 1 << 16
_CLOSE_SECONDS = 1.5
"""Time for environments to close when the pool hangs up."""
_FINISH_SECONDS = 10.0
"""Time for `finish` of an episode that is given up; then it is closed."""


def serve_shared(descriptor: int, factory: Any) -> None:
    """Answer requests until the pool hangs up; ends this process."""
    asyncio.run(_SharedLoop(descriptor, factory).serve())


class _SharedEpisode:
    """An episode's environment, its thread, and the call under way."""

    def __init__(self, factory: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.calls = EpisodeCalls(factory, seed_generators=None)
        self.task: asyncio.Task[None] | None = None
        self._ident = 0
        self._loop = loop
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="episode", initializer=self._begin_thread
        )

    def _begin_thread(self) -> None:
        import threading

        self._ident = threading.get_ident()
        # Before Python 3.10, locks and queues of asyncio look for the loop as they are made.
        asyncio.set_event_loop(self._loop)

    async def run(self, calls: Calls) -> dict[str, Any]:
        """What the calls come to. Raises what they raise."""
        returned = None
        while True:
            try:
                function = calls.send(returned)
            except StopIteration as stop:
                return stop.value
            returned = await self._loop.run_in_executor(self._thread, function)
            if inspect.isawaitable(returned):
                returned = await returned

    async def end(self, reason: str | None) -> None:
        """Tell the environment why it ends, if there is a reason, and close it, behind what its
        thread still does.
        """
        if self.task is not None:  # what was cancelled may clean up first
            await asyncio.wait([self.task], timeout=_FINISH_SECONDS)
        finish = self._note_errors("finish", self.calls.give_up(reason))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(finish, _FINISH_SECONDS)
        await self._note_errors("close", self.calls.close())
        self._thread.shutdown(wait=False)

    async def _note_errors(self, name: str, calls: Calls) -> None:
        try:
            await self.run(calls)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # of the user's code, which nobody asks any more
            note_error(name, error)

    def stack(self) -> list[str]:
        """Where the user's code stands, as traceback writes it; empty where it does not run."""
        in_thread = [*traceback.walk_stack(sys._current_frames().get(self._ident))]
        in_thread.reverse()
        awaited = []
        coroutine: Any = self.task.get_coro() if self.task is not None else None
        while coroutine is not None:
            frame = getattr(coroutine, "cr_frame", None)
            if frame is not None:
                awaited.append((frame, frame.f_lineno))
            coroutine = getattr(coroutine, "cr_await", None)
        return format_user_frames(awaited) + format_user_frames(in_thread)


class _SharedLoop:
    """All episodes of a process."""

    def __init__(self, descriptor: int, factory: Any) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._factory = factory
        self._frames = FrameStream()
        self._episodes: dict[int, _SharedEpisode] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        self._sending = asyncio.Lock()
        loop = asyncio.get_running_loop()
        while True:
            received = b""
            with contextlib.suppress(OSError):
                received = await loop.sock_recv(self._socket, _READ)
            if not received:
                break
            self._frames.add(received)
            while True:
                frame = self._frames.take()
                if frame is None:
                    break
                await self._begin(frame[1], json.loads(frame[2]))
        await self._end()

    async def _begin(self, number: int, request: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        index = request["episode"]
        if request["call"] == "drop":
            await self._drop(number, index, request["reason"])
            return
        if request["call"] == "reset":
            self._episodes[index] = _SharedEpisode(self._factory, loop)
        episode = self._episodes[index]
        episode.task = loop.create_task(self._answer(number, index, episode, request))

    async def _answer(
        self, number: int, index: int, episode: _SharedEpisode, request: dict[str, Any]
    ) -> None:
        timer = CallTimer()
        try:
            answer = await episode.run(episode.calls.begin(request))
        except asyncio.CancelledError as error:
            if self._episodes.get(index) is not episode:
                raise
            payload = timer.encode_fault(error)  # cancelled by the user's own code
        except BaseException as error:  # the user's code may raise anything, exits too
            payload = timer.encode_fault(error)
        else:
            payload = timer.encode(answer)
        if request["call"] == "finish":
            self._retire(index, None)
        await self._reply(number, payload)

    async def _drop(self, number: int, index: int, reason: str | None) -> None:
        """Give an episode up: its call is cancelled, and what its thread does is left alone."""
        episode = self._episodes.get(index)
        stack: list[str] = []
        if episode is not None:
            stack = episode.stack()
            self._cancel(index, reason)
        payload = json.dumps({"stack": stack}).encode()
        await self._reply(number, payload)

    def _cancel(self, index: int, reason: str | None) -> None:
        """End an episode, and the call that it may be in."""
        episode = self._retire(index, reason)
        if episode.task is not None:
            episode.task.cancel()

    def _retire(self, index: int, reason: str | None) -> _SharedEpisode:
        episode = self._episodes.pop(index)
        closing = asyncio.get_running_loop().create_task(episode.end(reason))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return episode

    async def _reply(self, number: int, payload: bytes) -> None:
        async with self._sending:
            try:
                frame = pack_frame(number, payload)
                await asyncio.get_running_loop().sock_sendall(self._socket, frame)
            except OSError:
                os._exit(0)  # the pool is gone

    async def _end(self) -> None:
        for index in list(self._episodes):
            self._cancel(index, None)
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=_CLOSE_SECONDS)
        sys.stdout.flush()
        os._exit(0)
