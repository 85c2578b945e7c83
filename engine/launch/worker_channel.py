"""A Worker's channel in its process, by what it was told of its place: one host, or one of several.

Owns: making it, and what it is told and tells of the network. Does not own: the channel
(engine/channels), the sockets to peers on this host (process.py gets them from the Supervisor).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.channels.routed import AddressBook, AddressEntry, RoutedChannel
from engine.channels.shm.channel import ShmChannel
from engine.channels.tensors.pairs import TensorPairs
from engine.channels.zmq.channel import ZmqChannel
from engine.channels.zmq.curve_keys import CurveKeyPair
from engine.launch.control import Network, Open, PeerAddresses
from engine.observe.reports import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChannel:
    """A Worker's channel with what is below it. book: addresses on other hosts, None where there
    are none. pairs: the worlds in which weights and device columns come and go.
    """

    channel: RoutedChannel
    shm: ShmChannel
    pairs: TensorPairs
    book: AddressBook | None = None
    _refused: list[int] = field(default_factory=lambda: [0])
    """How many were told of."""

    def serve(self, peer: str, connection: socket.socket, meeting: int | None) -> None:
        """A peer on this host reads over this socket, and may ask over it for tensors by the world
        that is met here.
        """
        if meeting is not None:
            self.pairs.meet(peer, meeting, writes=True)
        self.shm.serve(peer, connection)

    def write(self, where: PeerAddresses) -> None:
        """Where peers on other hosts answer now."""
        for peer, endpoint, epoch in where.entries:
            if self.book is not None:
                self.book.write(peer, AddressEntry(endpoint=endpoint, epoch=epoch))

    def reports(self) -> list[Report]:
        """Since the last call: payload bytes that came, by route, and messages of peers that were
        refused.
        """
        moved = self.channel.moved()
        if came := self.pairs.moved():
            moved["collective"] = came
        found = [(f"edge/{route}/bytes", float(size), 1.0) for route, size in moved.items()]
        refused = sum(self.channel.refused.values()) - self._refused[0]
        if refused:
            self._refused[0] += refused
            found.append(("edge/refused", float(refused), 1.0))
        return found


def place(opened: Open, dial: Callable[[str], socket.socket]) -> WorkerChannel:
    """The channel of a Worker. Raises RunError where its address is none of this host."""
    shm = ShmChannel(
        opened.worker,
        opened.epoch,
        dial,
        limit=opened.outbox,
        directory=opened.spill,
        verify=opened.verify,
    )
    pairs = TensorPairs(
        opened.worker, shm.have_sent, content=opened.verify == "content", alive=shm.require
    )
    shm.send_by(pairs.asked)
    network = opened.network
    if network is None:
        return WorkerChannel(channel=RoutedChannel(shm), shm=shm, pairs=pairs)
    book = AddressBook(network.peers)
    far = _far(opened, network, book, shm)
    channel = RoutedChannel(
        shm, near=frozenset(network.near), far=far, book=book, lease=network.lease
    )
    return WorkerChannel(channel=channel, shm=shm, pairs=pairs, book=book)


def _far(opened: Open, network: Network, book: AddressBook, shm: ShmChannel) -> ZmqChannel:
    address = f"[{network.address}]" if ":" in network.address else network.address
    return ZmqChannel(
        opened.worker,
        opened.epoch,
        book.address,
        bind=f"tcp://{address}:*",
        keys=CurveKeyPair(public=network.public, secret=network.secret) if network.peers else None,
        private=not network.peers,
        allowed={key: name for name, key in network.peers.items()},
        patience=max(network.lease, 5.0),
        heartbeat=min(5.0, network.lease / 4),
        outbox=shm,
    )
