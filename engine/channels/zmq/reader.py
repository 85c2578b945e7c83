"""The reading end of a connection to one peer on another host.

Owns: the DEALER socket, and its monitor, which reports a lost connection. Does not own: messages
and their checks (engine/channels/multipart.py), whom to ask (peers.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import zmq
from zmq.utils.monitor import recv_monitor_message

from dataflow.errors import RunError
from engine.channels.block_requests import FetchRequest, Wanted
from engine.channels.contract import PeerLost, Requests
from engine.channels.multipart import IncomingReply, Message, message_of, seal_message
from engine.channels.peers import PeerReader
from engine.channels.zmq.curve_keys import Address, CurveKeyPair

LARGEST = 16 << 30
"""Bytes of one buffer, at most."""
_DENIED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
LOST = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | _DENIED
"""Events after which a connection has to be made anew."""


def connect_monitored(dealer: zmq.Socket, endpoint: str) -> tuple[zmq.Socket, zmq.Poller]:
    """Connect a socket. Returns what tells of its end (LOST), and a poller of both."""
    monitor: zmq.Socket = dealer.get_monitor_socket(LOST)
    poller = zmq.Poller()
    poller.register(dealer, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    dealer.connect(endpoint)
    return monitor, poller


class ZmqReader(PeerReader):
    """Rows of one peer's blocks. Not for several threads at once. dealer: not connected yet;
    is_current: whether the peer still answers at this endpoint.
    """

    def __init__(
        self, peer: str, dealer: zmq.Socket, endpoint: str, is_current: Callable[[], bool]
    ) -> None:
        super().__init__(peer)
        self._socket = dealer
        self._is_current = is_current
        self._monitor, self._poller = connect_monitored(dealer, endpoint)

    def ask(self, requests: Requests) -> int:
        """See PeerReader; the request is queued until the peer is connected."""
        self._last += 1
        if self._monitor.poll(0):
            raise self._mark_disconnected()
        if not self._is_current():
            # A process on a host that hangs outlives the lease, and its connection stays.
            raise self.mark_lost("another process answers for it by now")
        request = FetchRequest(self._last, tuple(map(Wanted.of, requests)))
        try:
            self._socket.send(seal_message(request), zmq.NOBLOCK)
        except zmq.Again as error:  # a lost connection has no queue
            raise self.mark_lost("the connection is lost") from error
        return self._last

    def answer(self, number: int, requests: Requests, deadline: float) -> list[pa.RecordBatch]:
        """See PeerReader."""
        try:
            reply = IncomingReply.of(*self._next(number, deadline))
            while not reply.whole:
                reply.add(*self._next(number, deadline))
            return reply.rows(requests)
        except PeerLost:
            raise
        except RunError as error:
            raise self.mark_invalid(error) from error

    def close(self) -> None:
        """Close the connection."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _next(self, number: int, deadline: float) -> tuple[Message, list[Any]]:
        """The next message and its frames; answers to earlier requests are dropped."""
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(self._poller.poll(int(left * 1e3) + 1))
            if self._socket in ready:
                first, *frames = self._socket.recv_multipart(copy=False)
                message = message_of(first.buffer)
                if message.id == number:
                    return message, [frame.buffer for frame in frames]
            elif self._monitor in ready:
                raise self._mark_disconnected()
        raise self.mark_lost(
            "did not answer in time. Fix: look at its process and its host's network"
        )

    def _mark_disconnected(self) -> PeerLost:
        return self.mark_lost(describe_loss(self._monitor))


def describe_loss(monitor: zmq.Socket) -> str:
    """Why a connection is lost, by its monitor's next event, one of LOST."""
    event: Mapping[str, Any] = recv_monitor_message(monitor)
    if event["event"] & _DENIED:
        return "refused the connection, or has another key. Fix: see its log"
    return "the connection is lost: its process or its host is gone"


def dealer_socket(
    context: zmq.Context, address: Address, keys: CurveKeyPair | None, heartbeat: float
) -> zmq.Socket:
    """A socket for a ZmqReader. heartbeat: seconds of silence after which its peer is lost."""
    dealer = context.socket(zmq.DEALER)
    limit = int(heartbeat * 1000)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RECONNECT_IVL, -1)
    dealer.setsockopt(zmq.MAXMSGSIZE, LARGEST)
    dealer.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(heartbeat * 250)))
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, limit)
    dealer.setsockopt(zmq.HANDSHAKE_IVL, limit)
    dealer.setsockopt(zmq.CONNECT_TIMEOUT, limit)
    if keys is not None and address.key is not None:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, address.key)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    return dealer
