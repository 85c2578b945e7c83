"""Frames between a pool and its processes: a header with who sends, which call, how many bytes.

Owns: the format, cutting a stream into frames, the child's end of a socket. Does not own: what is
in a frame (JSON; a pickled target), the parent's end (connection.py).

    frame   4 bytes of mark, the sender's pid, the number of the call, bytes of payload; the payload
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

MARK = b"dfe\x01"
HEADER = struct.Struct("<4sIQQ")
LARGEST_REPLY = 64 << 20
"""Most bytes of a frame from a process."""
_READ = 1 << 16
_CUT_OFF = 1
"""Exit code of a process that cannot reply any more."""


class BadFrame(Exception):
    """The bytes on a socket are no frame of its process; says why."""


def pack_frame(number: int, payload: bytes) -> bytes:
    """A frame of this process's."""
    return HEADER.pack(MARK, os.getpid(), number, len(payload)) + payload


class FrameStream:
    """Bytes that came over a socket, cut into frames."""

    def __init__(self, largest: int | None = None) -> None:
        """largest: most bytes of a payload; None: any."""
        self._received = bytearray()
        self._largest = largest

    def add(self, received: bytes) -> None:
        """Add bytes that came."""
        self._received += received

    def clear(self) -> None:
        """Forget what came."""
        self._received.clear()

    def take(self) -> tuple[int, int, bytes] | None:
        """Take the next whole frame: sender's pid, call, payload. Raises BadFrame."""
        received = self._received
        if not MARK.startswith(received[: len(MARK)]):
            beginning = bytes(received[:40])
            raise BadFrame(f"{beginning!r} came where its answer was expected")
        if len(received) < HEADER.size:
            return None
        _, sender, number, size = HEADER.unpack_from(received)
        if self._largest is not None and size > self._largest:
            raise BadFrame(f"an answer of {size} bytes came, and one may have {self._largest}")
        end = HEADER.size + size
        if len(received) < end:
            return None
        payload = bytes(received[HEADER.size : end])
        del received[:end]
        return sender, number, payload


class ParentSocket:
    """The socket to the pool's process, in a process that runs environments."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self._file = os.fstat(descriptor)[1:3]
        self._frames = FrameStream()
        self._pid = os.getpid()

    def receive(self) -> tuple[int, bytes] | None:
        """The next frame's call and payload; None if the parent has hung up, or is gone."""
        while True:
            frame = self._frames.take()
            if frame is not None:
                return frame[1], frame[2]
            received = b""
            with contextlib.suppress(OSError):
                received = self.socket.recv(_READ)
            if not received:
                return None
            self._frames.add(received)

    def reply(self, number: int, payload: bytes) -> None:
        """Answer a call; ends this process if it cannot, or if the environment forked it."""
        if os.getpid() != self._pid:
            sys.stderr.write("a fork of the environment returned: it has to end by os._exit\n")
            sys.stderr.flush()
        elif self._is_open():
            with contextlib.suppress(OSError):
                self.socket.sendall(pack_frame(number, payload))
                return
        else:
            with contextlib.suppress(OSError, ValueError):
                print("a file descriptor that is not the environment's own was closed by it")
        os._exit(_CUT_OFF)

    def _is_open(self) -> bool:
        """Whether its descriptor is still the same socket: the environment may have closed it."""
        with contextlib.suppress(OSError):
            return os.fstat(self.socket.fileno())[1:3] == self._file
        return False
