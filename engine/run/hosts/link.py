"""The run's end of the conversation with one host.

    thread   waits for                                            unblocked by
    link     room in the cluster (`dial`)                         Ray, the end of the wait, `close`
    link     the end of a call, something to say, the next try    Ray, the loop, the clock
    loop     nothing here (hosts.py waits for all links)          -

Owns: calls one after another, the lease, and when a host is lost. Does not own: how a call is made
(ray.py), the other end (desk.py), the messages (hosts.py), numbers (numbered_messages.py).

    a call ends with         then
    what the host says       the next call, at once
    Unreachable              the same call again after BEAT; the host is lost as the lease ends
    Gone                     the host is lost: at once where its process has ended for certain, else
                             as the lease ends, which its own Workers do not outlive
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from dataflow.errors import RunError
from engine.protocol.reports import Doing
from engine.run.control.host_messages import HostBeat
from engine.run.control.thread_errors import ErrorsTo
from engine.run.control.wire import decode_message, encode_message
from engine.run.hosts.desk import BEAT, Heard
from engine.run.hosts.numbered_messages import Arrived, ToSend

_log = logging.getLogger(__name__)
_PATIENCE = 1.5
"""Seconds without an acknowledgement after which everything unacknowledged is said again."""
_SILENCE = 2.0
"""Seconds without an answer after which a host counts as silent."""
_WAKE = object()


class Unreachable(RunError):
    """A call failed; whether the host took it is not known."""


class Gone(RunError):
    """The host's process will not answer any more. ended: its processes are gone for certain."""

    def __init__(self, problem: str, *, ended: bool) -> None:
        super().__init__(problem)
        self.ended = ended


class HostLost(RunError):
    """No Worker of this host runs any more. ended: its process ended, its node is still there."""

    def __init__(self, problem: str, *, ended: bool) -> None:
        super().__init__(problem)
        self.ended = ended


class Calls(Protocol):
    """What a host is called by. No method blocks."""

    def say(self, first: int, frames: list[bytes]) -> None:
        """Hand frames over; they may get lost."""
        ...

    def hear(self, count: int, known: float) -> Future[Heard]:
        """See Desk.answer."""
        ...

    def meaning(self, error: BaseException) -> RunError:
        """What a failed call says of the host: Unreachable, Gone, or another error of it."""
        ...

    def end(self) -> None:
        """End the host's process, as far as it can be reached."""
        ...


Dial = Callable[[threading.Event], Calls | None]
"""Waits for a host and returns how it is called; None once the event is set. Raises RunError."""


class HostLink:
    """One conversation with one host. The thread calls on_change when `hear` has something."""

    def __init__(self, name: str, dial: Dial, lease: float, on_change: Callable[[], None]) -> None:
        self.name = name
        self.doing: tuple[Doing, ...] = ()
        self.stacks: tuple[str, ...] = ()
        """Those that came last."""
        self.ahead = math.inf
        """Seconds by which this host's clock is ahead, plus the time of the fastest message."""
        self.moved = 0
        """Bytes sent and received."""
        self.reached = False
        """Whether the host has answered."""
        self._dial = dial
        self._calls: Calls
        self._lease = lease
        self._on_change = on_change
        self._to_send, self._arrived = ToSend(), Arrived()
        self._known = -math.inf
        """The latest clock of the host that was heard."""
        self._heard = self._acknowledged = 0.0
        self._warned = False
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        """Guards what follows."""
        self._came: deque[bytes] = deque()
        self._failure: RunError | None = None
        self._thread = threading.Thread(target=self._run, name=f"link to {name}", daemon=True)
        self._thread.start()

    def say(self, message: Any) -> None:
        """Send, and send again until it has arrived; never blocks. A closed link sends nothing."""
        self._inbox.put(encode_message(message))

    def hear(self) -> list[Any]:
        """The messages since the last call. Raises HostLost once the host is lost, and RunError if
        it was never reached.
        """
        with self._lock:
            bodies = [*self._came]
            self._came.clear()
            if not bodies and self._failure is not None:
                raise self._failure
        return [decode_message(body) for body in bodies]

    @property
    def silent(self) -> bool:
        """Whether the host, once reached, has not answered for a while, so that it may be lost."""
        return self.reached and time.monotonic() - self._heard > _SILENCE

    def close(self) -> None:
        """End the thread, and the host's process."""
        self._stop.set()
        self._inbox.put(_WAKE)
        self._thread.join()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        with ErrorsTo(self._raise_in_the_loop):
            self._dial_and_converse()

    def _raise_in_the_loop(self, error: BaseException) -> None:
        """Let the loop raise what nobody expects here."""
        _log.error("host %s: %s", self.name, error, exc_info=error)
        self._fail(RunError(f"host {self.name}: internal error: {type(error).__name__}: {error}"))

    def _dial_and_converse(self) -> None:
        try:
            calls = self._dial(self._stop)
            if calls is None:
                return
            self._calls = calls
        except RunError as error:
            self._fail(error)
            return
        with contextlib.ExitStack() as after:
            after.callback(calls.end)
            self._heard = self._acknowledged = time.monotonic()
            try:
                self._converse()
            except RunError as error:
                self._fail(error)

    def _converse(self) -> None:
        self._call()
        due = math.inf
        while not self._stop.is_set():
            item = self._next(due)
            if isinstance(item, bytes):
                self._to_send.add(item)
            elif isinstance(item, Future):
                due = self._take(item)
            self._look_for_silence()
            if time.monotonic() >= due:
                due = math.inf
                self._call()
            self._send()

    def _next(self, due: float) -> Any:
        """The next message to say or end of a call; None if the next call is due before."""
        left = min(due, time.monotonic() + BEAT) - time.monotonic()
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=max(0.0, left))
        return None

    def _call(self) -> None:
        asked = self._calls.hear(self._arrived.count, self._known)
        asked.add_done_callback(self._inbox.put)

    def _take(self, done: Future[Heard]) -> float:
        """The end of a call; returns when the next one is due. Raises HostLost."""
        now = time.monotonic()
        if (error := done.exception()) is not None:
            self._handle_failure(self._calls.meaning(error))
            return now + BEAT
        acknowledged, clock, first, frames, beat = done.result()
        self._heard, self._known, self._warned, self.reached = now, clock, False, True
        if self._to_send.acknowledge(acknowledged):
            self._acknowledged = now
        self.moved += len(beat) + sum(map(len, frames))
        if beat:
            self._take_beat(decode_message(beat, (HostBeat,)))
        if bodies := self._arrived.take(first, frames):
            with self._lock:
                self._came.extend(bodies)
            self._on_change()
        return now

    def _handle_failure(self, error: RunError) -> None:
        if isinstance(error, Gone) and error.ended:
            raise HostLost(f"host {self.name}: {error}", ended=True)
        if not isinstance(error, Gone | Unreachable):
            raise RunError(f"host {self.name}: {error}")
        self._warn(error)

    def _take_beat(self, beat: HostBeat) -> None:
        # A slow message makes the host's clock look behind; the fastest one says most.
        self.ahead = min(self.ahead, self._heard - beat.now)
        self.doing = tuple(self._of_this_clock(doing) for doing in beat.doing)
        self.stacks = beat.stacks or self.stacks

    def _of_this_clock(self, doing: Doing) -> Doing:
        since, waits_since = doing.since + self.ahead, doing.waits_since + self.ahead
        return msgspec.structs.replace(doing, since=since, waits_since=waits_since)

    def _send(self) -> None:
        now = time.monotonic()
        if self._to_send.is_settled:
            self._acknowledged = now
        elif now - self._acknowledged > _PATIENCE:
            self._acknowledged = now
            self._to_send.resend()
        while (batch := self._to_send.take())[1]:
            first, frames = batch
            self.moved += sum(map(len, frames))
            self._calls.say(first, frames)

    def _warn(self, error: RunError) -> None:
        if not self._warned:
            left = max(0.0, self._heard + self._lease - time.monotonic())
            _log.warning("host %s: %s; it is given up in %.0f s", self.name, error, left)
        self._warned = True

    def _look_for_silence(self) -> None:
        silent = time.monotonic() - self._heard
        if silent > self._lease:
            lease = f"the lease is {self._lease:g} s"
            problem = f"not heard of for {silent:.0f} s ({lease})"
            raise HostLost(f"host {self.name}: {problem}", ended=False)

    def _fail(self, error: RunError) -> None:
        with self._lock:
            self._failure = error
        self._on_change()
