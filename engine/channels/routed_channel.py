"""The channel of a Worker with peers on its own host and on others: one outbox, read by shm or zmq.

Owns: the route to each peer, the addresses of peers on other hosts, retries after a lost
connection, received bytes by route. Does not own: either transport (shm/, zmq/).

    fetch waits for            unblocked by
    a peer on this host        as in shm/channel.py
    a peer on another host     its reply; its process is gone (AddressBook); the lease is over

The network to another host may heal, so a request over a lost connection is repeated until its
Worker is reported gone or the lease is over. An answer that was damaged on its way is requested
again; on one host that cannot happen, so the request fails at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from dataflow.errors import RunError
from engine.channels.contract import BlockRequest, MovedBytes, PeerLost, Requests
from engine.channels.shm.channel import ShmChannel
from engine.channels.zmq.curve_keys import Address, PeerKeys

if TYPE_CHECKING:  # zmq takes 3 MiB, and is for several hosts
    from engine.channels.zmq.channel import ZmqChannel

_log = logging.getLogger(__name__)

_AGAIN = 0.25
"""Seconds until a lost connection is tried again."""
REFUSALS = 3
"""Invalid answers after which a request fails."""
Fetch = Callable[[Requests], list[pa.RecordBatch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressEntry:
    """Where a peer's incarnation answers; its endpoint is empty once it is gone. key: its public
    one; empty without encryption. meeting: where the ranks meet of which it is the first.
    """

    endpoint: str
    epoch: int
    key: bytes = b""
    meeting: str = ""


class AddressBook:
    """Addresses and public keys of peers, for several threads. keys: of their incarnations now."""

    def __init__(self) -> None:
        self.keys = PeerKeys()
        self._entries: dict[str, AddressEntry] = {}
        self._changed = threading.Condition()

    def write(self, peer: str, entry: AddressEntry) -> None:
        """Set a peer's entry, unless one of a later incarnation is known."""
        with self._changed:
            known = self._entries.get(peer)
            if known is not None and known.epoch > entry.epoch:
                return
            self.keys.put(peer, entry.key)
            self._entries[peer] = entry
            self._changed.notify_all()

    def address(self, peer: str) -> Address:
        """Where a peer answers. Raises PeerLost if it is gone."""
        with self._changed:
            entry = self._entries.get(peer)
        if entry is None or not entry.endpoint:
            problem = "expected its process on another host, found none."
            raise PeerLost(peer, f"{problem} Fix: see its log for why it ended.")
        return Address(endpoint=entry.endpoint, key=entry.key or None)

    def require(self, request: BlockRequest) -> None:
        """Raises PeerLost if the incarnation that kept a block is gone."""
        self.address(request.worker)
        with self._changed:
            epoch = self._entries[request.worker].epoch
        if request.block >> 32 != epoch:
            raise PeerLost(request.worker, f"its process that kept block {request.block} is gone")

    def meeting(self, peer: str, epoch: int, timeout: float) -> Address:
        """Where the ranks meet of which this incarnation is the first; waits for it at most so
        long. Raises PeerLost if it is gone, or has not said where in time.
        """

        def find_entry() -> AddressEntry | None:
            """Its entry, once that says where, or is one of a later incarnation."""
            entry = self._entries.get(peer)
            if entry is None or entry.epoch < epoch:
                return None
            if entry.epoch == epoch and not entry.meeting:
                return None
            return entry

        with self._changed:
            entry = self._changed.wait_for(find_entry, timeout)
        if entry is None or entry.epoch != epoch:
            problem = "its process is gone, or it has not said where its ranks meet"
            raise PeerLost(peer, f"{problem}. Fix: look at what it says in its log.")
        return Address(endpoint=entry.meeting, key=entry.key or None)

    def wait(self, seconds: float) -> None:
        """Wait until an entry changes, at most so long."""
        with self._changed:
            self._changed.wait(seconds)


class RoutedChannel:
    """One Worker's channel. near: peers on its own host (None: all); far: the channel to all
    others. lease: seconds within which a lost connection may come back.
    """

    def __init__(
        self,
        shm: ShmChannel,
        *,
        near: frozenset[str] | None = None,
        far: ZmqChannel | None = None,
        book: AddressBook | None = None,
        lease: float = 30.0,
    ) -> None:
        self.name = shm.name
        # The only outbox is that of shm; other hosts are sent rows from its slabs.
        self.keep, self.allocate, self.release = shm.keep, shm.allocate, shm.release
        self._shm = shm
        self._near = near
        self._zmq = far
        self._book = book
        self._lease = lease
        self._moved = MovedBytes()

    def __len__(self) -> int:
        return len(self._shm)

    @property
    def endpoint(self) -> str:
        """Where other hosts reach it; empty if they do not."""
        if self._zmq is None:
            return ""
        return self._zmq.address.endpoint

    @property
    def refusals(self) -> dict[str, int]:
        """Messages and handshakes of each peer that were refused."""
        if self._zmq is None:
            return self._shm.refusals
        return self._shm.refusals | self._zmq.refusals

    @property
    def spilled_bytes(self) -> int:
        """Bytes of the outbox in files."""
        return self._shm.spilled_bytes

    def fetch(self, requests: Requests) -> list[pa.RecordBatch]:
        """See engine/channels/contract.py."""
        return self._fetch(requests, self._zmq.fetch if self._zmq is not None else _no_far)

    def fetch_beside(self, requests: Requests) -> list[pa.RecordBatch]:
        """See engine/channels/contract.py."""
        return self._fetch(requests, self._zmq.fetch_beside if self._zmq is not None else _no_far)

    def _fetch(self, requests: Requests, fetch_far: Fetch) -> list[pa.RecordBatch]:
        routes = [self._route(request.worker) for request in requests]
        rows: dict[int, pa.RecordBatch] = {}
        far = partial(self._fetch_far, fetch_far)
        for route, fetch in (("shm", self._shm.fetch), ("zmq", far)):
            numbers = [i for i, taken in enumerate(routes) if taken == route]
            if numbers:
                fetched = fetch([requests[i] for i in numbers])
                rows.update(zip(numbers, fetched, strict=True))
        for i, request in enumerate(requests):
            if request.worker != self.name:
                self._moved.add(routes[i], rows[i].nbytes)
        return [rows[i] for i in range(len(requests))]

    def take_moved_bytes(self) -> dict[str, int]:
        """Return the payload bytes by route since the last call."""
        return self._moved.take_counts()

    def close(self) -> None:
        """Release all resources."""
        if self._zmq is None:
            self._shm.close()
        else:
            self._zmq.close()  # and with it its outbox, which is that of shm

    def _route(self, peer: str) -> str:
        near = self._near is None or peer == self.name or peer in self._near
        return "shm" if near else "zmq"

    def _fetch_far(self, fetch: Fetch, requests: Requests) -> list[pa.RecordBatch]:
        assert self._book is not None
        end, refused = time.monotonic() + self._lease, 0
        while True:
            for request in requests:
                self._book.require(request)
            try:
                return fetch(requests)
            except PeerLost as lost:
                if time.monotonic() > end:
                    raise
                # The book may say meanwhile that the peer is gone, or where it answers now.
                _log.warning("%s; trying again", lost)
                self._book.wait(_AGAIN)
            except RunError:  # the channel has counted and logged it
                refused += 1
                if refused == REFUSALS:
                    raise


def _no_far(requests: Requests) -> list[pa.RecordBatch]:
    """Never asked for a row: all peers are on this host."""
    raise AssertionError(f"{len(requests)} requests to another host, and there is none")
