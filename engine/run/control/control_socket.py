"""One end of a control socket: frames with descriptors, over a socket pair of two processes.

Owns: framing, limits, descriptors in transit. Does not own: the contents of frames (wire.py).

    frame   8 bytes of length, 1 byte: how many descriptors come with it, then the payload
"""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dataflow.errors import RunError
from engine.channels.descriptors import more_files

LIMIT = 1 << 28
"""Bytes of the largest frame."""
_MOST_DESCRIPTORS = 64
_HEADER = struct.Struct("<QB")
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message as received; the receiver closes the descriptors."""

    payload: bytes
    descriptors: tuple[int, ...] = ()


class ControlSocket:
    """Whole frames; blocks if the socket does. Any thread may send, only one may receive."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._read = bytearray()
        self._came: deque[int] = deque()
        self._lock = threading.Lock()
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self.moved = 0
        """Bytes sent and received."""

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something is left to send."""
        return bool(self._unsent)

    def send(self, payload: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send or queue a frame; close its descriptors. Raises OSError if the other end is gone."""
        if len(payload) > LIMIT or len(descriptors) > _MOST_DESCRIPTORS:
            problem = f"expected at most {LIMIT} bytes, found {len(payload)}"
            raise RunError(f"control message: {problem}. Fix: send less at once.")
        head = _HEADER.pack(len(payload), len(descriptors))
        with self._lock:
            self._unsent.append((memoryview(head + payload), tuple(descriptors)))
            self._flush()

    def flush(self) -> None:
        """Send what is left, as far as there is room."""
        with self._lock:
            self._flush()

    def receive(self) -> list[Frame] | None:
        """The frames that one read completes; None if the other end is gone. Raises RunError."""
        try:
            received, ancillary, flags, _ = self.sock.recvmsg(
                _CHUNK, socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        self._take(ancillary)
        if flags & socket.MSG_CTRUNC:
            raise RunError(f"control socket: descriptors were cut off. Fix: {more_files()}.")
        if not received:
            return None
        self.moved += len(received)
        self._read += received
        return self._whole()

    def close(self) -> None:
        """Close the socket and every descriptor in transit. Closing twice does nothing."""
        with self._lock:
            self._drop()
            _close(self._came)
            self._came.clear()
            self.sock.close()

    def _drop(self) -> None:
        for _, descriptors in self._unsent:
            _close(descriptors)
        self._unsent.clear()

    def _take(self, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        for level, kind, packed in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                # Cut off (MSG_CTRUNC), the last number may be a part of one. Those before are
                # descriptors of this process now, and closed with it.
                numbers = array.array("i")
                numbers.frombytes(packed[: len(packed) - len(packed) % numbers.itemsize])
                self._came.extend(numbers)

    def _whole(self) -> list[Frame]:
        frames: list[Frame] = []
        start = 0
        while len(self._read) - start >= _HEADER.size:
            size, count = _HEADER.unpack_from(self._read, start)
            if size > LIMIT or count > _MOST_DESCRIPTORS:
                problem = f"expected a frame of at most {LIMIT} bytes, found one of {size}"
                raise RunError(f"control socket: {problem}.")
            end = start + _HEADER.size + size
            if len(self._read) < end:
                break
            if (came := len(self._came)) < count:
                raise RunError(f"control socket: expected {count} descriptors, found {came}.")
            payload = bytes(memoryview(self._read)[start + _HEADER.size : end])
            descriptors = tuple(self._came.popleft() for _ in range(count))
            frames.append(Frame(payload=payload, descriptors=descriptors))
            start = end
        del self._read[:start]
        return frames

    def _flush(self) -> None:
        while self._unsent:
            unsent, descriptors = self._unsent[0]
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            ancillary = [rights] if descriptors else []
            try:
                sent = self.sock.sendmsg([unsent], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:  # nobody will read the rest
                self._drop()
                raise
            self.moved += sent
            _close(descriptors)  # they travel with the first byte
            if sent == len(unsent):
                self._unsent.popleft()
            else:
                self._unsent[0] = (unsent[sent:], ())


def _close(descriptors: Sequence[int] | deque[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
