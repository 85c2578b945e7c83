"""Messages with descriptors over a connected AF_UNIX stream socket.

Owns: the framing (four bytes of length, then the message), descriptors, partial reads and writes.
Does not own: what messages mean.

A message has at most one descriptor, sent with its first byte, so descriptors arrive in the order
of their messages.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections import deque

from dataflow.errors import RunError
from engine.channels.descriptors import more_files

LARGEST = 64 << 20
"""Bytes of one message, at most; rows are never sent here."""
_HEAD = struct.Struct("<I")
_READ = 1 << 18
_DESCRIPTORS = 64
"""Descriptors per read, at most."""


class SocketClosed(Exception):
    """The other end is gone."""


class FdSocket:
    """One end of a socket. It never blocks: what cannot be sent yet is queued."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.descriptors: deque[int] = deque()
        """Received, and not taken yet."""
        self._in = bytearray()
        self._out: deque[tuple[memoryview, int | None]] = deque()
        self.waiting = 0
        """Bytes that are queued."""

    def send(self, message: bytes, descriptor: int | None = None) -> None:
        """Send what the socket takes now; queue the rest. Raises SocketClosed, RunError."""
        unsent = memoryview(_HEAD.pack(len(message)) + message)
        if not self._out:
            sent = self._send_some(unsent, descriptor)
            if sent == len(unsent):
                return
            unsent, descriptor = unsent[sent:], None if sent else descriptor
        if descriptor is not None:
            descriptor = _duplicate(descriptor)
        self._out.append((unsent, descriptor))
        self.waiting += len(unsent)

    def flush(self) -> bool:
        """Send more of the queue; returns whether it is empty. Raises SocketClosed."""
        while self._out:
            unsent, descriptor = self._out[0]
            sent = self._send_some(unsent, descriptor)
            if not sent:
                return False
            self.waiting -= sent
            if descriptor is not None:
                os.close(descriptor)
            if sent == len(unsent):
                self._out.popleft()
            else:
                self._out[0] = (unsent[sent:], None)
        return True

    def drain(self, deadline: float) -> bool:
        """Send the queue; returns whether that is done by this time. Raises SocketClosed."""
        while not self.flush():
            left = deadline - time.monotonic()
            poll = select.poll()
            poll.register(self.socket, select.POLLOUT)
            if left <= 0 or not poll.poll(left * 1e3):
                return False
        return True

    def _send_some(self, unsent: memoryview, descriptor: int | None) -> int:
        """Bytes that the socket took, maybe 0. Raises SocketClosed."""
        try:
            if descriptor is None:
                return self.socket.send(unsent, socket.MSG_NOSIGNAL)
            return socket.send_fds(self.socket, [unsent], [descriptor], socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise SocketClosed(str(error)) from error

    def receive(self) -> list[bytes]:
        """Every whole message that has arrived. Raises SocketClosed, RunError."""
        try:
            received, descriptors, flags, _ = socket.recv_fds(
                self.socket, _READ, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise SocketClosed(str(error)) from error
        self.descriptors.extend(descriptors)
        if flags & socket.MSG_CTRUNC:
            raise RunError(f"the descriptor of a message was lost. Fix: {more_files()}")
        if not received:
            raise SocketClosed("end of file")
        self._in += received
        return self._whole()

    def _whole(self) -> list[bytes]:
        messages, start = [], 0
        while len(self._in) - start >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._in, start)
            if length > LARGEST:
                raise RunError(f"expected a message of at most {LARGEST} bytes, found {length}")
            end = start + _HEAD.size + length
            if len(self._in) < end:
                break
            messages.append(bytes(self._in[start + _HEAD.size : end]))
            start = end
        del self._in[:start]
        return messages

    def wait(self, deadline: float) -> bool:
        """Wait for data until this monotonic time, sending meanwhile. Raises SocketClosed."""
        while (left := deadline - time.monotonic()) > 0:
            wanted = select.POLLIN
            if not self.flush():
                wanted |= select.POLLOUT
            poll = select.poll()
            poll.register(self.socket, wanted)
            if any(what & ~select.POLLOUT for _, what in poll.poll(left * 1e3)):
                return True
        return False

    def close(self) -> None:
        """Close the socket and every descriptor that was not taken."""
        self.socket.close()
        waiting = [d for _, d in self._out if d is not None]
        for descriptor in (*waiting, *self.descriptors):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._out.clear()
        self.descriptors.clear()


def _duplicate(descriptor: int) -> int:
    """A descriptor of the queue's own: the caller may close the other. Raises RunError."""
    try:
        return os.dup(descriptor)
    except OSError as error:
        problem = f"expected a free file descriptor, found {error}"
        raise RunError(f"{problem}. Fix: {more_files()}") from error
