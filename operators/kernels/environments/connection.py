"""The pool's end of a socket to one of its processes: frames out without waiting, frames in.

Owns: what is queued for a full socket, descriptors that go along, reading. Does not own: what
frames say; who waits (the selector is the pool's).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Sequence
from selectors import EVENT_READ, EVENT_WRITE

from operators.kernels.environments.child.frames import LARGEST_REPLY, FrameStream, pack_frame

_READ = 1 << 18
_READS = 64
"""Most reads in one go: others wait, too."""


class Connection:
    """A socket that never blocks. frames: what has come."""

    def __init__(
        self, end: socket.socket, selector: selectors.BaseSelector, hear: Callable[[], None]
    ) -> None:
        """hear: called when there is something to read, or the other end has hung up."""
        end.setblocking(False)
        self._socket = end
        self._selector = selector
        self._hear = hear
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self.frames = FrameStream(LARGEST_REPLY)
        self.is_open = True
        self._is_ending = False
        selector.register(end, EVENT_READ, self._act)

    def send(self, number: int, payload: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a frame as soon as there is room. descriptors go along, and are closed here then."""
        if not self.is_open:
            _close_all(descriptors)
            return
        frame = memoryview(pack_frame(number, payload))
        self._unsent.append((frame, descriptors))
        if len(self._unsent) == 1:
            self._send_queued()

    def read(self) -> bool:
        """Read what is there; False once the other end has hung up."""
        for _ in range(_READS):
            try:
                received = self._socket.recv(_READ)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                return False
            if not received:
                return False
            self.frames.add(received)
            if len(received) < _READ:
                return True
        return True

    def end(self) -> None:
        """Hang up once everything is sent; what comes can be read all the same."""
        self._is_ending = True
        if self.is_open and not self._unsent:
            self._shut()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):  # the other end has hung up before
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Hang up, and read nothing more."""
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self._socket)
            self._socket.close()
            while self._unsent:
                _close_all(self._unsent.popleft()[1])

    def _act(self, events: int) -> None:
        # What was heard of just before may have closed it.
        if self.is_open and events & EVENT_WRITE:
            self._send_queued()
        if self.is_open and events & EVENT_READ:
            self._hear()

    def _send_queued(self) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while self._unsent:
                self._send_first()
        events = EVENT_READ | EVENT_WRITE if self._unsent else EVENT_READ
        if self._selector.get_key(self._socket).events != events:
            self._selector.modify(self._socket, events, self._act)
        if self._is_ending and not self._unsent:
            self._shut()

    def _send_first(self) -> None:
        frame, descriptors = self._unsent[0]
        try:
            if descriptors:
                sent = socket.send_fds(self._socket, [frame], descriptors)
            else:
                sent = self._socket.send(frame, socket.MSG_NOSIGNAL)
        except ConnectionError:  # it has hung up, which reading finds out
            sent = len(frame)
        _close_all(descriptors)
        if sent == len(frame):
            self._unsent.popleft()
        else:
            self._unsent[0] = (frame[sent:], ())


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
