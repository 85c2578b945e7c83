"""A host's end of the conversation with the process of a run.

    thread        waits for                                  unblocked by
    a call        something to say, at most BEAT (`answer`)  the thread of the run's part
    the run's     a message, a change here (`take`)          a call, the Supervisor's thread
    lease         the end of the lease                       the clock, `close`

Owns: what came and what is to say, the lease. Does not own: the calls (ray.py), carrying out
messages (host.py), numbers (numbered_messages.py).

The lease counts from when this end said something that the run has provably heard since, so it ends
here before the run counts this host as lost, however long messages take.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, get_args

from engine.protocol.reports import Doing
from engine.run.control import host_messages as hm
from engine.run.control.control import Forget, PeerAddresses, Quit
from engine.run.control.wire import decode_message, encode_message
from engine.run.hosts.numbered_messages import Arrived, ToSend

_log = logging.getLogger(__name__)

CHANGED = object()
"""What `take` returns when something has changed on this host."""
_EARLIER = 0.9
"""Of the lease, what passes until this end gives up: the Workers have to end, too, before the run
counts the host as lost.
"""
BEAT = 0.5
"""Seconds after which a call returns that has found nothing to say."""
_FROM_RUN = (*get_args(hm.ToHost), Forget, PeerAddresses, Quit)

Heard = tuple[int, float, int, list[bytes], bytes]
"""Frames of the run that are here; this end's clock; the number of the first of these frames; the
frames; a HostBeat once in BEAT seconds, else nothing."""


class Desk:
    """Calls on_end when the run ends or is given up, and doing for heartbeats."""

    def __init__(self) -> None:
        self.on_end: Callable[[], None] = lambda: None
        self.doing: Callable[[], list[Doing]] = list
        self.stacks: tuple[str, ...] = ()
        """For the next heartbeat."""
        self.given_up = False
        """Whether the lease has ended."""
        self._changed = threading.Condition()
        """Guards what follows."""
        self._inbox: deque[Any] = deque()
        self._pending = False
        self._to_send, self._arrived = ToSend(), Arrived()
        self._lease = math.inf
        self._known = time.monotonic()
        """When this end said what the run has heard last."""
        self._beats = 0.0
        """When the next heartbeat is due."""
        self._ended = False
        self._over = False
        self._thread = threading.Thread(target=self._watch_the_lease, name="lease", daemon=True)
        self._thread.start()

    # --- calls of the run -------------------------------------------------------------------------

    def accept(self, first: int, frames: Sequence[bytes]) -> None:
        """Take these frames of the run. first: the number of the first of them."""
        with self._changed:
            for body in self._arrived.take(first, frames):
                message = decode_message(body, _FROM_RUN)
                if isinstance(message, Quit):
                    self._end()
                    continue
                if isinstance(message, hm.Begin):
                    self._lease = message.lease * _EARLIER
                self._inbox.append(message)
            self._changed.notify_all()

    def answer(self, count: int, known: float) -> Heard:
        """Wait until there is something to say to the run, and return it. count: its
        acknowledgement; known: the latest clock of this end that it has heard.
        """
        with self._changed:
            # `known` is this end's own clock come back: the run has heard what was said then.
            self._known = max(self._known, known)
            self._to_send.acknowledge(count)
            self._to_send.resend()  # a call that failed took frames along
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._to_send.is_settled, BEAT)
            first, frames = self._to_send.take()
            acknowledged, now = self._arrived.count, time.monotonic()
        return acknowledged, now, first, frames, self._beat(now)

    def _beat(self, now: float) -> bytes:
        if now < self._beats and not self.stacks:
            return b""
        self._beats = now + BEAT
        stacks, self.stacks = self.stacks, ()
        beat = hm.HostBeat(now=now, doing=tuple(self.doing()), stacks=stacks)
        return encode_message(beat)

    # --- the run's part ---------------------------------------------------------------------------

    def take(self) -> Any:
        """The next message of the run, or CHANGED; None once the run has ended or is given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox)
            item = self._inbox[0]
            if item is not None:  # which stays: the end does not pass
                self._inbox.popleft()
            if item is CHANGED:
                self._pending = False
            return item

    def note_change(self) -> None:
        """Let `take` return CHANGED; from any thread."""
        with self._changed:
            if not self._pending:
                self._pending = True
                self._inbox.append(CHANGED)
                self._changed.notify_all()

    def say(self, message: Any) -> None:
        """To the run; never blocks. What is said after the lease has ended goes nowhere: the run
        begins such a host again, and that its Workers have ended here is no failure of the run.
        """
        body = encode_message(message)
        with self._changed:
            if not self.given_up:
                self._to_send.add(body)
                self._changed.notify_all()

    def settle(self, seconds: float) -> None:
        """Wait until the run has everything, at most `seconds`; not if it was given up."""
        with self._changed:
            self._changed.wait_for(lambda: self.given_up or self._to_send.is_settled, seconds)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._inbox.append(None)
            self._changed.notify_all()
            self.on_end()

    def _watch_the_lease(self) -> None:
        with self._changed:
            while not self._over:
                left = self._known + self._lease - time.monotonic()
                if left <= 0 and not self._ended:
                    text = "nothing was heard of the run for %.0f s: its Workers here are ended"
                    _log.warning(text, self._lease)
                    self.given_up = True
                    self._end()
                if 0 < left < math.inf:
                    self._changed.wait(left)
                else:  # no lease yet, or it has ended: only `close` or Begin changes that
                    self._changed.wait()
