"""Messages between the process of a run and a host, over calls that may fail, repeat or be lost.

Owns: cutting messages into frames, their numbers, what the other end has not acknowledged. Does not
own: the calls (link.py, desk.py), the messages (host_messages.py). Pure.

Ray runs an actor's calls in order, but a call whose connection breaks fails without saying whether
it ran. So frames have numbers: they are handed over again until the other end has them, and what it
has is left out there. A frame is small enough to travel within a call: what is larger than 100 KB
Ray would put into its object store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

FRAME = 48_000
"""Bytes of the largest frame."""
AT_ONCE = 88_000
"""Bytes of frames in one call."""
_AROUND = 8
"""Bytes that a call needs for each frame beside its own."""
_MORE, _LAST = b"m", b"l"


class ToSend:
    """One end's frames, until the other end has them. Not thread-safe."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._first = 0
        """The number of the first frame that is kept."""
        self._next = 0
        """The number of the first frame that was not handed out yet."""

    @property
    def is_settled(self) -> bool:
        """Whether the other end has everything."""
        return not self._frames

    def add(self, body: bytes) -> None:
        """A message, of any size."""
        start = 0
        while start + FRAME < len(body):
            self._frames.append(_MORE + body[start : start + FRAME])
            start += FRAME
        self._frames.append(_LAST + body[start:])

    def acknowledge(self, count: int) -> bool:
        """Drop what the other end has, this many frames; returns whether that is news."""
        fresh = count - self._first
        for _ in range(fresh):
            self._frames.popleft()
        self._first += max(0, fresh)
        self._next = max(self._next, self._first)
        return fresh > 0

    def resend(self) -> None:
        """Hand out again what was not acknowledged: it may be lost."""
        self._next = self._first

    def take(self) -> tuple[int, list[bytes]]:
        """The number of the first of these frames, and as many as fit into one call."""
        start, size, frames = self._next, 0, []
        for frame in islice(self._frames, start - self._first, None):
            size += len(frame) + _AROUND
            if frames and size > AT_ONCE:
                break
            frames.append(frame)
        self._next += len(frames)
        return start, frames


class Arrived:
    """The other end's frames: each once, in order. Not thread-safe."""

    def __init__(self) -> None:
        self.count = 0
        """How many frames are here, which acknowledges them."""
        self._parts: list[bytes] = []

    def take(self, first: int, frames: Sequence[bytes]) -> list[bytes]:
        """The messages that these frames complete. Those after a gap come again."""
        messages = []
        for number, frame in enumerate(frames, first):
            if number != self.count:
                continue
            self.count += 1
            self._parts.append(frame[1:])
            if frame[:1] == _LAST:
                messages.append(b"".join(self._parts))
                self._parts = []
        return messages
