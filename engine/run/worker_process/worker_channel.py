"""A Worker's channel in its process, for a run on one host or several.

Owns: making it and its keys, data sockets to peers on this host, addresses of other peers, metrics.
Does not own: the channel (engine/channels), which Workers are connected when (peers.py).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.channels.contract import PeerLost
from engine.channels.routed_channel import AddressBook, AddressEntry, RoutedChannel
from engine.channels.shm.channel import ShmChannel
from engine.channels.tensors.pairs import TensorPairs
from engine.channels.tensors.shared_memories import SharedMemories
from engine.channels.zmq.curve_keys import CurveKeyPair, any_port
from engine.protocol.reports import Report
from engine.run.control.control import (
    ChannelBound,
    Connect,
    Network,
    Open,
    PeerAddress,
    PeerAddresses,
)

if TYPE_CHECKING:  # zmq takes 3 MiB, and is for several hosts
    from engine.channels.zmq.channel import ZmqChannel
    from engine.channels.zmq.rendezvous import MeetingServer


class PeerSockets:
    """Data sockets to other Workers that the Supervisor sent and the channel has not taken yet."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}
        self._lock = threading.Lock()

    def put(self, peer: str, sock: socket.socket) -> None:
        """Add a socket. An earlier one to this peer that was not taken led to a lost process."""
        with self._lock:
            earlier = self._sockets.pop(peer, None)
            self._sockets[peer] = sock
        if earlier is not None:  # of another epoch of the peer
            earlier.close()

    def dial(self, peer: str) -> socket.socket:
        """A socket to this peer's channel. Raises PeerLost if it has no process."""
        with self._lock:
            # The Supervisor sends one to each living peer before the instruction that needs it.
            sock = self._sockets.pop(peer, None)
        if sock is None:
            problem = "expected its process, found none that runs."
            raise PeerLost(peer, f"{problem} Fix: see its log for why it ended.")
        return sock


@dataclass(slots=True, kw_only=True)
class WorkerChannel:
    """A Worker's channel and its parts. book: peers on other hosts; pairs: worlds for tensors;
    memories: for weights.
    """

    channel: RoutedChannel
    shm: ShmChannel
    pairs: TensorPairs
    memories: SharedMemories
    sockets: PeerSockets
    book: AddressBook | None = None
    keys: CurveKeyPair | None = None
    bound: ChannelBound | None = None
    """Where peers on other hosts reach it, if there are any."""
    meeting: MeetingServer | None = None
    """Where the ranks of several hosts meet of which this is the first."""
    refused: int = 0
    """How many refused messages have been reported."""

    def connect(self, connect: Connect, descriptors: tuple[int, ...]) -> None:
        """Take the data socket to a peer on this host and, if any, the world for tensors."""
        sock = socket.socket(fileno=descriptors[0])
        if connect.tensors:
            self.pairs.meet(connect.peer, descriptors[1], writes=connect.serve)
        if connect.serve:
            self.shm.serve(connect.peer, sock)
        else:
            self.sockets.put(connect.peer, sock)

    def write(self, where: PeerAddresses) -> None:
        """Note where peers answer now, and which keys they have."""
        if self.book is not None:
            for peer in where.entries:
                self.book.write(peer.worker, _entry(peer, peer.epoch))

    def reports(self) -> list[Report]:
        """Payload bytes received, by route, and peers' messages refused, since the last call."""
        moved = self.channel.take_moved_bytes()
        if came := self.pairs.take_moved_bytes():
            moved["collective"] = came
        if read := self.memories.take_moved_bytes():
            moved["ipc"] = read
        reports = [(f"edge/{route}/bytes", float(size), 1.0) for route, size in moved.items()]
        if refused := sum(self.channel.refusals.values()) - self.refused:
            self.refused += refused
            reports.append(("edge/refused", float(refused), 1.0))
        return reports


def worker_channel(
    opened: Open, dial: Callable[[str], socket.socket] | None = None
) -> WorkerChannel:
    """The channel of a Worker. dial: makes a socket to a peer (None: takes what `connect` got).
    Raises RunError where its address does not belong to this host.
    """
    sockets = PeerSockets()
    name, epoch, limit, verify = opened.worker, opened.epoch, opened.outbox, opened.verify
    dial = dial or sockets.dial
    shm = ShmChannel(name, epoch, dial, limit=limit, directory=opened.spill, verify=verify)
    content = verify == "content"
    pairs = TensorPairs(name, shm.have_sent, content=content, alive=shm.require)
    shm.send_by(pairs.begin_send)
    memories = SharedMemories(name, shm.require_answer)
    network = opened.network
    if network is None:
        return WorkerChannel(
            channel=RoutedChannel(shm), shm=shm, pairs=pairs, memories=memories, sockets=sockets
        )
    # Made here, so that the secret key never leaves this process.
    keys = None if network.private else CurveKeyPair.make()
    book = AddressBook()
    far, near = _make_far(opened, network, keys, book, shm), frozenset(network.near)
    channel = RoutedChannel(shm, near=near, far=far, book=book, lease=network.lease)
    meeting = _make_meeting(opened, network, keys, book)
    bound = ChannelBound(
        endpoint=channel.endpoint,
        key=keys.public if keys else b"",
        meeting=meeting.endpoint if meeting else "",
    )
    book.write(name, _entry(bound, epoch))
    return WorkerChannel(
        channel=channel,
        shm=shm,
        pairs=pairs,
        memories=memories,
        sockets=sockets,
        book=book,
        keys=keys,
        bound=bound,
        meeting=meeting,
    )


def _entry(message: PeerAddress | ChannelBound, epoch: int) -> AddressEntry:
    return AddressEntry(
        endpoint=message.endpoint, epoch=epoch, key=message.key, meeting=message.meeting
    )


def _make_meeting(
    opened: Open, network: Network, keys: CurveKeyPair | None, book: AddressBook
) -> MeetingServer | None:
    """For the first of ranks on several hosts."""
    if opened.seat is None or not opened.seat.names or opened.seat.rank:
        return None
    from engine.channels.zmq.rendezvous import MeetingServer

    return MeetingServer(
        opened.worker,
        opened.seat.names,
        bind=any_port(network.address),
        keys=keys,
        allowed=book.keys,
        private=network.private,
    )


def _make_far(
    opened: Open,
    network: Network,
    keys: CurveKeyPair | None,
    book: AddressBook,
    shm: ShmChannel,
) -> ZmqChannel:
    from engine.channels.zmq.channel import ZmqChannel

    return ZmqChannel(
        opened.worker,
        opened.epoch,
        book.address,
        bind=any_port(network.address),
        keys=keys,
        private=network.private,
        allowed=book.keys,
        patience=max(network.lease, 5.0),
        heartbeat=min(5.0, network.lease / 4),
        outbox=shm,
    )
