"""The pull channel between hosts: rows are picked by their owner and sent, one frame a buffer.

Owns: both ends of one Worker: its outbox and its connections to peers. Does not own: the form of
messages (multipart.py), keys and addresses (keys.py; they come with the launch).

    fetch waits for            unblocked by
    the reply of each peer     that peer's server thread; a lost connection, a heartbeat that is missing

With keys every byte is encrypted and every peer known (CURVE). Without them only this host's
processes can be spoken with: any other address refuses to bind.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import zmq
from zmq.utils.monitor import recv_monitor_message

from dataflow.batch import Batch
from dataflow.errors import RunError
from engine.channels.contract import BlockRequest, Channel, PeerLost
from engine.channels.frames import forms_of
from engine.channels.inproc import InprocChannel
from engine.channels.projection import picked
from engine.channels.zmq.curve_keys import Address, CurveKeyPair
from engine.channels.zmq.messages import (
    Answered,
    Header,
    Part,
    Sums,
    Wanted,
    question_bytes,
    received,
    reply_of,
)
from engine.channels.zmq.server import ZmqServer

_log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds for an answer, from a peer whose heartbeat is there."""
HEARTBEAT = 5.0
"""Seconds without a sign of life after which a connection is lost."""
LARGEST = 16 << 30
"""Bytes of one buffer, at most."""

T = TypeVar("T")

_LOST = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_DENIED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

FindPeer = Callable[[str], Address]
"""A peer's name -> where it answers. Raises PeerLost where there is none."""


class ZmqChannel:
    """Outbox and pull channel of one Worker of several on several hosts.

    bind: where to answer; `endpoint` then says where exactly. keys: this Worker's own, with which
    it answers and asks; allowed: the public keys of the run's Workers, with their names; it may
    change while the channel lives. outbox: where the blocks are, None for one of its own; it is
    closed with the channel. private: nobody else is on the network, so that it may be bound without
    keys.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        peers: FindPeer,
        *,
        bind: str = "tcp://127.0.0.1:*",
        keys: CurveKeyPair | None = None,
        allowed: Mapping[bytes, str] | None = None,
        patience: float = PATIENCE,
        heartbeat: float = HEARTBEAT,
        outbox: Channel | None = None,
        private: bool = False,
    ) -> None:
        self.name = name
        self._peers = peers
        self._keys = keys
        self._patience = patience
        self._heartbeat = heartbeat
        self._outbox: Channel = InprocChannel(epoch) if outbox is None else outbox
        self._context = zmq.Context()
        self._asked: dict[str, _Peer] = {}
        self._refused: Counter[str] = Counter()
        self._asking = threading.Lock()
        self._keeping = threading.Lock()
        try:
            known = {} if allowed is None else allowed
            self._server = ZmqServer(
                name,
                epoch,
                self._context,
                bind=bind,
                find=self._find,
                keys=keys,
                allowed=known,
                private=private,
            )
        except RunError:
            self._context.destroy(linger=0)
            raise
        self.address = Address(
            endpoint=self._server.endpoint, key=None if keys is None else keys.public
        )

    @property
    def refused(self) -> dict[str, int]:
        """How many messages, or handshakes, of each peer were refused."""
        return dict(self._refused + self._server.refused)

    def keep(self, batch: Batch) -> int:
        """Keep a batch as it is. Raises DataError for a column that cannot travel."""
        forms_of(batch.records.schema)
        with self._keeping:
            return self._outbox.keep(batch)

    def allocate(self, nbytes: int) -> np.ndarray:
        """Ordinary memory: frames are sent from wherever they lie."""
        return self._outbox.allocate(nbytes)

    def release(self, block: int) -> None:
        """Forget a block; frames of it that are on their way keep their memory."""
        with self._keeping:
            self._outbox.release(block)

    def __len__(self) -> int:
        return len(self._outbox)  # type: ignore[arg-type]

    def fetch(self, requests: Sequence[BlockRequest]) -> list[pa.RecordBatch]:
        """See engine/channels/contract.py."""
        others: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            if request.worker != self.name:
                others.setdefault(request.worker, []).append(index)
        with self._asking:
            found = self._fetch_others(
                {p: [requests[i] for i in many] for p, many in others.items()}
            )
        rows = {i: r for p, many in others.items() for i, r in zip(many, found[p], strict=True)}
        return [
            rows[i] if i in rows else self._outbox.fetch([r])[0] for i, r in enumerate(requests)
        ]

    def close(self) -> None:
        """Let everything go: the thread, sockets, blocks."""
        self._server.close()
        for peer in self._asked.values():
            peer.close()
        self._asked.clear()
        self._context.destroy(linger=0)
        self._outbox.close()

    def _find(self, wanted: Wanted) -> pa.RecordBatch:
        (records,) = self._outbox.fetch([BlockRequest(worker=self.name, block=wanted.block)])
        return picked(records, wanted.columns, wanted.index())

    def _fetch_others(
        self, asked: dict[str, list[BlockRequest]]
    ) -> dict[str, list[pa.RecordBatch]]:
        """Ask every peer, then take the answers."""
        deadline = time.monotonic() + self._patience
        for name, requests in asked.items():
            self._from(name, lambda peer, many=requests: peer.ask(many))
        return {
            name: self._from(name, lambda peer, many=requests: peer.answer(many, deadline))
            for name, requests in asked.items()
        }

    def _from(self, name: str, what: Callable[[_Peer], T]) -> T:
        """Do something with a peer's connection, which is made anew next time where it fails for
        good.
        """
        peer = self._peer(name)
        try:
            return what(peer)
        except RunError as error:
            if not isinstance(error, PeerLost):
                self._refused[peer.name] += 1
                _log.warning("%s", error)
            if peer.broken:
                self._asked.pop(peer.name).close()
            raise

    def _peer(self, name: str) -> _Peer:
        found = self._asked.get(name)
        if found is None:
            found = _Peer(name, self._context, self._peers(name), self._keys, self._heartbeat)
            self._asked[name] = found
        return found


class _Peer:
    """A connection to one peer's server."""

    def __init__(
        self,
        name: str,
        context: zmq.Context,
        address: Address,
        keys: CurveKeyPair | None,
        heartbeat: float,
    ) -> None:
        self.name = name
        self.broken = False
        self._last = 0
        self._socket = _dealer(context, address, keys, heartbeat)
        self._monitor: zmq.Socket = self._socket.get_monitor_socket(_LOST)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(address.endpoint)

    def ask(self, requests: Sequence[BlockRequest]) -> None:
        """Send a question; it waits in the socket until the peer is connected. Raises PeerLost."""
        self._last += 1
        if self._monitor.poll(0):
            raise self._lost(recv_monitor_message(self._monitor))
        try:
            self._socket.send(question_bytes(self._last, requests), zmq.NOBLOCK)
        except zmq.Again as error:  # a connection that is lost has no queue
            self.broken = True
            raise PeerLost(self.name, "the connection is lost") from error

    def answer(self, requests: Sequence[BlockRequest], deadline: float) -> list[pa.RecordBatch]:
        """The answer to the last question. Raises KeyError, DataError, PeerLost, RunError."""
        try:
            reply = Answered.of(*self._next(deadline))
            while not reply.whole:
                reply.add(*self._next(deadline))
            return received(reply, requests)
        except PeerLost:
            raise
        except RunError as error:
            raise self._wrong(error) from error

    def close(self) -> None:
        """Close the connection."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _next(self, deadline: float) -> tuple[Header | Part | Sums, list[Any]]:
        """The next message and its frames; those that answer earlier questions are dropped."""
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(self._poller.poll(int(left * 1e3) + 1))
            if self._socket in ready:
                first, *frames = self._socket.recv_multipart(copy=False)
                message = reply_of(first.buffer)
                if message.id == self._last:
                    return message, [frame.buffer for frame in frames]
            elif self._monitor in ready:
                raise self._lost(recv_monitor_message(self._monitor))
        self.broken = True
        raise PeerLost(
            self.name,
            "did not answer in time. Fix: see what it is doing, and the network to its host",
        )

    def _lost(self, event: Mapping[str, Any]) -> PeerLost:
        self.broken = True
        if event["event"] & _DENIED:
            return PeerLost(
                self.name,
                "refused the connection, or is another than its key says. Fix: see its log",
            )
        return PeerLost(self.name, "the connection is lost: its process or its host is gone")

    def _wrong(self, error: RunError) -> RunError:
        self.broken = True
        return RunError(
            f"{self.name}: refused: {error}. Fix: both ends have to be of one build of the engine."
        )


def _dealer(
    context: zmq.Context, address: Address, keys: CurveKeyPair | None, heartbeat: float
) -> zmq.Socket:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RECONNECT_IVL, -1)
    dealer.setsockopt(zmq.MAXMSGSIZE, LARGEST)
    dealer.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(heartbeat * 250)))
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(heartbeat * 1000))
    dealer.setsockopt(zmq.HANDSHAKE_IVL, int(heartbeat * 1000))
    dealer.setsockopt(zmq.CONNECT_TIMEOUT, int(heartbeat * 1000))
    if keys is not None and address.key is not None:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, address.key)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    return dealer
