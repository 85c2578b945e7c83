"""ZAP authentication by public key (ZeroMQ RFC 27), within the process.

Owns: the known keys, counts of refused peers. Does not own: the guarded socket, what an accepted
peer may send. ZeroMQ asks about a peer's key at `socket`; it refuses peers without a key itself,
and reports that at `monitor`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from engine.channels.zmq.curve_keys import Names

_log = logging.getLogger(__name__)

_ZAP = "inproc://zeromq.zap.01"
_KEY = "X-Key"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class CurveAuthenticator:
    """Authenticates a context's peers, on the guarded socket's thread. allowed: the names of those
    who may connect; it may change.
    """

    def __init__(self, context: zmq.Context, guarded: zmq.Socket, allowed: Names) -> None:
        self.refused: Counter[str] = Counter()
        self._allowed = allowed
        self._guarded = guarded
        self.socket: zmq.Socket = context.socket(zmq.REP)
        self.socket.bind(_ZAP)
        self.monitor: zmq.Socket = guarded.get_monitor_socket(_FAILED)

    def register(self, poller: zmq.Poller) -> None:
        """Wait for both sockets with this poller."""
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)

    def answer(self, ready: Mapping[object, int]) -> None:
        """Answer a waiting question and count a waiting failure."""
        if self.socket in ready:
            self._answer()
        if self.monitor in ready:
            where = recv_monitor_message(self.monitor)["endpoint"].decode(errors="replace")
            self.refused[where] += 1
            _log.warning("%s: refused: a connection without a key", where)

    def knows(self, frame: zmq.Frame) -> bool:
        """Whether the key by which the sender of a message was accepted is allowed still."""
        key = str(frame.get(_KEY)).encode()
        return self._allowed.get(key) is not None

    def close(self) -> None:
        """Close both sockets, but not the guarded one."""
        self._guarded.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)

    def _answer(self) -> None:
        version, request, _, address, _, mechanism, *credentials = self.socket.recv_multipart()
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        peer = self._allowed.get(key)
        if peer is None:
            where = address.decode(errors="replace")
            self.refused[where] += 1
            _log.warning("%s: refused: its key is not one of this run", where)
            verdict = [b"400", b"not a key of this run", b"", b""]
        else:
            # The key goes with each message of the peer: it may be taken back later (`knows`).
            verdict = [b"200", b"OK", peer.encode(), _property(_KEY, key)]
        self.socket.send_multipart([version, request, *verdict])


def _property(name: str, content: bytes) -> bytes:
    """Metadata of a connection as ZMTP 3 writes it; each of its messages has it."""
    return bytes([len(name)]) + name.encode() + len(content).to_bytes(4, "big") + content
