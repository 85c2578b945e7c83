"""The thread of a Worker that tells its peers where blocks lie.

    waits for                          unblocked by
    a request, room in a socket        the peer; a new peer or the end: the Worker's own threads

Owns: one connection for each peer that dialled, what each of them was already told. Does not own:
blocks (outbox.py), framing (packets.py).

It never waits for one peer alone: what a slow one does not take stays in its queue, and from such a
one nothing more is read meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dataflow.errors import RunError
from engine.channels.contract import BlockRequest
from engine.channels.shm.block_index import SIZE
from engine.channels.shm.fd_socket import FdSocket, SocketClosed
from engine.channels.shm.messages import (
    BoardHere,
    Fetch,
    Reply,
    Send,
    ShapeHere,
    SlabGone,
    SlabHere,
    decode_from_reader,
    encode,
    requests_of,
)
from engine.channels.shm.outbox import SlabOutbox
from engine.channels.shm.slabs import Slab

_log = logging.getLogger(__name__)

ENOUGH = 1 << 20
"""Bytes of unsent answers from which on a peer's requests are left unread."""


@dataclass(slots=True, kw_only=True, eq=False)
class _ServedPeer:
    """A peer that reads from here, and what it was told."""

    peer: str
    packets: FdSocket
    slabs: set[int] = field(default_factory=set)
    shapes: set[int] = field(default_factory=set)


class SlabServer:
    """Answers the peers of one outbox from a thread of its own, until `close`.

    on_send: called from that thread where a peer asks for tensors, (peer, sequence, requests), and
    never waits.
    """

    def __init__(self, name: str, outbox: SlabOutbox) -> None:
        self.refused: Counter[str] = Counter()
        self.on_send: Callable[[str, int, Sequence[BlockRequest]], None] | None = None
        self._name = name
        self._outbox = outbox
        self._new: deque[tuple[str, socket.socket]] = deque()
        self._over = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._readers: list[_ServedPeer] = []
        self._thread = threading.Thread(target=self._run, name=f"rows of {name}", daemon=True)
        self._thread.start()

    def serve(self, peer: str, connection: socket.socket) -> None:
        """Answer this peer over this socket from now on; from any thread."""
        self._new.append((peer, connection))
        self.wake()

    def wake(self) -> None:
        """Let the thread look for new peers, and for slabs that are gone."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread and close every connection."""
        if self._over:
            return
        self._over = True
        self.wake()
        self._thread.join()
        for _, connection in self._new:
            connection.close()
        os.close(self._wake)

    # --- its thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._over:
                for key, what in self._selector.select():
                    if key.data is None:
                        self._woken()
                    else:
                        self._serve(key.data, what)
        finally:
            for reader in list(self._readers):
                self._drop(reader)
            self._selector.close()

    def _woken(self) -> None:
        os.eventfd_read(self._wake)
        while self._new:
            peer, connection = self._new.popleft()
            reader = _ServedPeer(peer=peer, packets=FdSocket(connection))
            self._readers.append(reader)
            self._selector.register(connection, selectors.EVENT_READ, reader)
            self._show_board(reader)
        with self._outbox.lock:
            gone = set(self._outbox.pool.gone())
        for reader in list(self._readers) if gone else ():
            self._tell_gone(reader, gone & reader.slabs)

    def _show_board(self, reader: _ServedPeer) -> None:
        try:
            reader.packets.send(encode(BoardHere(SIZE)), self._outbox.board.descriptor)
            self._watch(reader)
        except SocketClosed:
            self._drop(reader)

    def _tell_gone(self, reader: _ServedPeer, numbers: set[int]) -> None:
        reader.slabs -= numbers
        try:
            if numbers:
                reader.packets.send(encode(SlabGone(tuple(sorted(numbers)))))
            self._watch(reader)
        except SocketClosed:
            self._drop(reader)

    def _serve(self, reader: _ServedPeer, what: int) -> None:
        """Send what waits, and answer what came."""
        try:
            if what & selectors.EVENT_WRITE:
                reader.packets.flush()
            if what & selectors.EVENT_READ:
                for message in reader.packets.receive():
                    self._hear(reader, decode_from_reader(message))
            self._watch(reader)
        except SocketClosed:
            self._drop(reader)
        except RunError as error:
            self.refused[reader.peer] += 1
            _log.warning("%s: request refused, its connection is closed: %s", reader.peer, error)
            self._drop(reader)

    def _hear(self, reader: _ServedPeer, message: Fetch | Send) -> None:
        if isinstance(message, Fetch):
            self._answer(reader, message)
        elif self.on_send is not None:
            self.on_send(reader.peer, message.sequence, requests_of(message, self._name))
        else:
            raise RunError(
                f"it asks for tensors of {len(message.parts)} blocks, and none are sent from here"
            )

    def _answer(self, reader: _ServedPeer, fetch: Fetch) -> None:
        answers = []
        self._outbox.sum_up(fetch.asks)
        with self._outbox.lock:  # until the descriptors are sent or duplicated, no slab goes
            for ask in fetch.asks:
                answer, slabs, forms = self._outbox.describe(ask)
                for slab in slabs:
                    self._introduce(reader, slab)
                if forms is not None and forms.hash not in reader.shapes:
                    reader.shapes.add(forms.hash)
                    reader.packets.send(encode(ShapeHere(forms.hash, forms.data)))
                answers.append(answer)
        reader.packets.send(encode(Reply(fetch.id, answers)))

    def _introduce(self, reader: _ServedPeer, slab: Slab) -> None:
        """Send a slab's descriptor, once."""
        if slab.number not in reader.slabs:
            reader.slabs.add(slab.number)
            reader.packets.send(
                encode(SlabHere(slab.number, slab.size, slab.on_disk)), slab.descriptor
            )

    def _watch(self, reader: _ServedPeer) -> None:
        waiting = reader.packets.waiting
        wanted = selectors.EVENT_READ if waiting < ENOUGH else 0
        wanted |= selectors.EVENT_WRITE if waiting else 0
        if self._selector.get_key(reader.packets.socket).events != wanted:
            self._selector.modify(reader.packets.socket, wanted, reader)

    def _drop(self, reader: _ServedPeer) -> None:
        self._readers.remove(reader)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(reader.packets.socket)
        reader.packets.close()
