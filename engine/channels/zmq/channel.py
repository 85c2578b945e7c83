"""The pull channel between hosts: the owner picks rows and sends them, one frame a buffer.

Owns: both ends of one Worker: its outbox and its connections. Does not own: messages
(engine/channels/multipart.py), keys and addresses (curve_keys.py; they come at launch).

    fetch waits for            unblocked by
    the reply of each peer     that peer's server thread; a lost connection, a missing heartbeat

With keys all traffic is encrypted and authenticated (CURVE). Without keys only a loopback address
can be bound, unless the network is said to be private.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pyarrow as pa
import zmq

from dataflow.batch import Batch
from dataflow.errors import RunError
from engine.channels.contract import BlockRequest, Channel, Requests
from engine.channels.inproc import InprocChannel
from engine.channels.layout import layout_of
from engine.channels.peers import PATIENCE, PeerReaders
from engine.channels.zmq.curve_keys import Address, CurveKeyPair, Names, PeerKeys, require_safe
from engine.channels.zmq.reader import ZmqReader, dealer_socket
from engine.channels.zmq.server import ZmqServer

HEARTBEAT = 5.0
"""Seconds without a sign of life after which a connection is lost."""

FindPeer = Callable[[str], Address]
"""A peer's name -> its address. Raises PeerLost."""


class ZmqChannel:
    """Outbox and pull channel of one Worker of several on several hosts.

    bind: where to answer; `address` has the port. keys: this Worker's own pair; allowed: whose
    keys the run's Workers have, which may change. outbox: where the blocks are (None: its
    own); closed with the channel. private: nobody else is on the network, so no keys are needed.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        peers: FindPeer,
        *,
        bind: str = "tcp://127.0.0.1:*",
        keys: CurveKeyPair | None = None,
        allowed: Names | None = None,
        patience: float = PATIENCE,
        heartbeat: float = HEARTBEAT,
        outbox: Channel | None = None,
        private: bool = False,
    ) -> None:
        self.name = name
        self._outbox: Channel = InprocChannel(epoch) if outbox is None else outbox
        self.allocate = self._outbox.allocate
        self._keeping = threading.Lock()
        require_safe(bind, keys, private=private)
        if allowed is None:
            allowed = PeerKeys()
        self._context = context = zmq.Context()
        try:
            self._server = ZmqServer(
                name, epoch, context, bind=bind, find=self._own, keys=keys, allowed=allowed
            )
        except RunError:
            context.destroy(linger=0)
            raise
        key = None if keys is None else keys.public
        self.address = Address(endpoint=self._server.endpoint, key=key)

        def connect(peer: str) -> ZmqReader:
            address = peers(peer)
            dealer = dealer_socket(context, address, keys, heartbeat)
            return ZmqReader(peer, dealer, address.endpoint, lambda: peers(peer) == address)

        self._peers = PeerReaders(name, connect, patience=patience)
        # Connections of their own: a version may take long, and rows are not to wait behind it.
        self._beside = PeerReaders(name, connect, patience=patience)

    @property
    def refusals(self) -> dict[str, int]:
        """Messages and handshakes of each peer that were refused."""
        return dict(self._peers.refused + self._beside.refused + self._server.refused)

    def keep(self, batch: Batch) -> int:
        """Keep a batch as it is. Raises DataError for a column type that cannot travel."""
        layout_of(batch.records.schema)
        with self._keeping:
            return self._outbox.keep(batch)

    def release(self, block: int) -> None:
        """Forget a block; its frames that are being sent keep their memory. Raises KeyError."""
        with self._keeping:
            self._outbox.release(block)

    def fetch(self, requests: Requests) -> list[pa.RecordBatch]:
        """See engine/channels/contract.py."""
        return self._peers.fetch(requests, self._own)

    def fetch_beside(self, requests: Requests) -> list[pa.RecordBatch]:
        """The same over other connections."""
        return self._beside.fetch(requests, self._own)

    def close(self) -> None:
        """Release all resources: the thread, sockets, blocks."""
        self._server.close()
        self._peers.close()
        self._beside.close()
        self._context.destroy(linger=0)
        self._outbox.close()

    def _own(self, request: BlockRequest) -> pa.RecordBatch:
        return self._outbox.fetch([request])[0]
