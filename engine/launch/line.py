"""One end of a conversation over connections that may break: each message arrives exactly once.

Owns: numbers, acknowledgements, resending. Does not own: sockets (hostlink.py, desk.py), the
messages (host_messages.py). Pure: the time is an argument.

A message is kept until the other end acknowledges it. Asides have no number and may be lost.
"""

from __future__ import annotations

from collections import deque

import msgspec

from dataflow.errors import RunError
from engine.coordinator.ordered_inbox import OrderedInbox

PATIENCE = 1.5
"""Seconds without an acknowledgement after which everything unacknowledged is sent again."""
_ASIDE = -1


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """run: whose conversation. number: from 0, -1 for an aside. ack: messages received so far."""

    run: bytes
    number: int
    ack: int
    body: bytes


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


def opened(data: bytes) -> Envelope:
    """The envelope in these bytes. Raises RunError for anything else."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(
            f"expected a message between hosts, found {len(data)} other bytes: {error}"
        ) from error


def aside(run: bytes, body: bytes) -> bytes:
    """The bytes of a message outside the numbered ones; it may be lost."""
    return _ENCODER.encode(Envelope(run, _ASIDE, 0, body))


class Line:
    """One end. Not thread-safe."""

    def __init__(self, run: bytes) -> None:
        self.run = run
        self._fence: OrderedInbox[bytes] = OrderedInbox()
        self._next = 0
        self._came = 0
        self._unheard: deque[tuple[int, bytes]] = deque()
        self._since = 0.0
        """When something was last acknowledged or sent again."""

    @property
    def settled(self) -> bool:
        """Whether the other end has everything."""
        return not self._unheard

    def say(self, body: bytes, now: float) -> bytes:
        """Number and keep a message; returns the bytes to send."""
        if not self._unheard:
            self._since = now
        self._unheard.append((self._next, body))
        self._next += 1
        return self._sealed(self._next - 1, body)

    def aside(self, body: bytes = b"") -> bytes:
        """The bytes of a message that may be lost; it carries an acknowledgement."""
        return self._sealed(_ASIDE, body)

    def take(self, envelope: Envelope, now: float) -> tuple[list[bytes], bytes]:
        """The messages that are complete up to now, each once and in order; the aside, if any."""
        while self._unheard and self._unheard[0][0] < envelope.ack:
            self._unheard.popleft()
            self._since = now
        if envelope.number == _ASIDE:
            return [], envelope.body
        found = self._fence.take(0, envelope.number, envelope.body)
        self._came += len(found)
        return found, b""

    def again(self, now: float, patience: float = PATIENCE) -> list[bytes]:
        """The frames to send again, if nothing was acknowledged for `patience` seconds."""
        if not self._unheard or now - self._since < patience:
            return []
        self._since = now
        return [self._sealed(number, body) for number, body in self._unheard]

    def _sealed(self, number: int, body: bytes) -> bytes:
        return _ENCODER.encode(Envelope(self.run, number, self._came, body))
