"""A rank's connection to where its group meets, on another host.

    waits for                       unblocked by
    the answer to its request       the first rank's server, its end (AddressBook), a time limit

Owns: the connection, made anew when it is lost or was refused since this rank was not known yet.
Does not own: the messages (rendezvous.py), what is asked (engine/channels/tensors/keyed_store.py).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from dataflow.errors import RunError
from engine.channels.contract import PeerLost
from engine.channels.zmq.curve_keys import Address, CurveKeyPair
from engine.channels.zmq.reader import connect_monitored, dealer_socket, describe_loss
from engine.channels.zmq.rendezvous import StoreReply, StoreRequest, What, encoded

_log = logging.getLogger(__name__)

_AGAIN = 0.25
"""Seconds until a lost connection is tried again."""
_HEARTBEAT = 5.0
"""Seconds without a sign of life after which a connection is lost."""
_REPLY = msgspec.msgpack.Decoder(StoreReply)

Find = Callable[[], Address]
"""Where the ranks meet. Raises PeerLost once the first of them is gone."""


class MeetingClient:
    """One end; from any thread, one request after another. first: the first rank's name. pause:
    waits so many seconds at most, less if an address changes. keys: None in a private network.
    """

    def __init__(
        self,
        first: str,
        find: Find,
        pause: Callable[[float], None],
        keys: CurveKeyPair | None,
        *,
        heartbeat: float = _HEARTBEAT,
    ) -> None:
        self._first, self._find, self._pause, self._keys = first, find, pause, keys
        self._heartbeat = heartbeat
        self._name = os.urandom(16)
        self._number = 0
        self._context = zmq.Context()
        self._line: _Line | None = None
        self._lock = threading.Lock()

    def another(self) -> MeetingClient:
        """A new end."""
        return MeetingClient(
            self._first, self._find, self._pause, self._keys, heartbeat=self._heartbeat
        )

    def ask(
        self,
        what: What,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        amount: int = 0,
        *,
        timeout: float,
    ) -> bytes:
        """The answer. Raises PeerLost if the first rank is gone or unreachable, RunError if what
        was asked for has not come in time.
        """
        with self._lock:
            self._number += 1
            number, end = self._number, time.monotonic() + timeout
            request = StoreRequest(self._name, number, what, list(keys), list(values), amount)
            while True:
                line = self._ensure_line()
                try:
                    return line.answer(encoded(request), number, end)
                except PeerLost as lost:
                    self._drop()
                    if time.monotonic() >= end:
                        raise
                    _log.warning("%s; trying again", lost)
                    self._pause(_AGAIN)
                except TimeoutError as late:
                    shown = ", ".join(keys)
                    problem = f"expected {shown} within {timeout:g} s, found nothing of it"
                    fix = "Fix: look at what the other ranks say."
                    raise RunError(f"{self._first}: {what}: {problem}. {fix}") from late

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._drop()
            self._context.destroy(linger=0)

    def _ensure_line(self) -> _Line:
        if self._line is None:
            address = self._find()
            dealer = dealer_socket(self._context, address, self._keys, self._heartbeat)
            self._line = _Line(self._first, dealer, address.endpoint)
        return self._line

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


class _Line:
    """One connection. dealer: not connected yet."""

    def __init__(self, peer: str, dealer: zmq.Socket, endpoint: str) -> None:
        self._peer = peer
        self._socket = dealer
        self._monitor, self._poller = connect_monitored(dealer, endpoint)

    def answer(self, request: bytes, number: int, end: float) -> bytes:
        """The answer to a request, before a monotonic time. Raises PeerLost, TimeoutError."""
        try:
            self._socket.send(request, zmq.NOBLOCK)
        except zmq.Again as error:  # a lost connection has no queue
            raise PeerLost(self._peer, "the connection is lost") from error
        while (left := end - time.monotonic()) > 0:
            ready = dict(self._poller.poll(int(left * 1e3) + 1))
            if self._socket in ready:
                reply = self._reply()
                if reply.number == number:
                    return reply.value
            elif self._monitor in ready:
                raise PeerLost(self._peer, describe_loss(self._monitor))
        raise TimeoutError

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _reply(self) -> StoreReply:
        try:
            return _REPLY.decode(self._socket.recv())
        except (msgspec.DecodeError, ValueError, OverflowError) as error:
            raise PeerLost(self._peer, f"expected an answer, found {error}") from error
