"""The thread of a Worker that tells its peers where blocks lie.

    waits for                          unblocked by
    a request, room in a socket        the peer; a new peer or the end: the Worker's own threads

Owns: the connection of each peer that dialled, and what it was sent. Does not own: blocks
(outbox.py), framing (fd_socket.py). Answers to a slow peer are queued, and nothing more is read
from it meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dataflow.errors import RunError
from engine.channels.block_requests import Answer, FetchRequest, Reply, encode
from engine.channels.contract import Requests
from engine.channels.shm import messages as m
from engine.channels.shm.block_index import SIZE
from engine.channels.shm.fd_socket import FdSocket, SocketClosed
from engine.channels.shm.outbox import SlabOutbox
from engine.channels.shm.slabs import Slab

_log = logging.getLogger(__name__)

ENOUGH = 1 << 20
"""Bytes of unsent answers at which a peer's requests are left unread."""


@dataclass(slots=True, kw_only=True, eq=False)
class ServedPeer:
    """A peer that reads from here, and what it was told."""

    peer: str
    socket: FdSocket
    slabs: set[int] = field(default_factory=set)
    schemas: set[bytes] = field(default_factory=set)


class SlabServer:
    """Answers the peers of one outbox from its own thread, until `close`."""

    def __init__(self, name: str, outbox: SlabOutbox) -> None:
        self.refused: Counter[str] = Counter()
        self.on_send: Callable[[str, int, Requests], None] | None = None
        """Called from the thread when a peer, of this name, asks for tensors; must not wait."""
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        """Called as the thread ends by an error: no peer is answered any more."""
        self._name = name
        self._outbox = outbox
        self._new: deque[tuple[str, socket.socket]] = deque()
        self._over = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._served: list[ServedPeer] = []
        self._thread = threading.Thread(target=self._run, name=f"rows of {name}", daemon=True)
        self._thread.start()

    def serve(self, peer: str, connection: socket.socket) -> None:
        """Answer a peer over this socket from now on; callable from any thread."""
        self._new.append((peer, connection))
        self.wake()

    def wake(self) -> None:
        """Let the thread look for new peers and slabs that are gone; callable from any thread."""
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

    def _run(self) -> None:
        try:
            self._serve_all()
        except BaseException as error:
            self.on_failure(error)
            raise
        finally:
            for reader in list(self._served):
                self._drop(reader)
            self._selector.close()

    def _serve_all(self) -> None:
        while not self._over:
            for key, what in self._selector.select():
                if key.data is None:
                    self._handle_wake()
                elif key.data in self._served:  # else dropped before in the same list
                    self._serve(key.data, what)

    def _handle_wake(self) -> None:
        os.eventfd_read(self._wake)
        while self._new:
            peer, connection = self._new.popleft()
            reader = ServedPeer(peer=peer, socket=FdSocket(connection))
            self._served.append(reader)
            self._selector.register(connection, selectors.EVENT_READ, reader)
            self._tell(reader, m.IndexHere(SIZE), self._outbox.index.descriptor)
        with self._outbox.lock:
            gone = set(self._outbox.pool.gone())
        if gone:
            for reader in list(self._served):
                self._tell_gone(reader, gone)

    def _tell_gone(self, reader: ServedPeer, gone: set[int]) -> None:
        """Tell a peer which of the slabs that it was sent are gone."""
        numbers = sorted(gone & reader.slabs)
        reader.slabs.difference_update(numbers)
        if numbers:
            self._tell(reader, m.SlabsGone(tuple(numbers)))

    def _tell(
        self, reader: ServedPeer, message: m.IndexHere | m.SlabsGone, descriptor: int | None = None
    ) -> None:
        """Send an unrequested message."""
        try:
            reader.socket.send(encode(message), descriptor)
            self._watch(reader)
        except SocketClosed:
            self._drop(reader)
        except RunError as error:
            _log.warning("%s: its connection is closed: %s", reader.peer, error)
            self._drop(reader)

    def _serve(self, reader: ServedPeer, what: int) -> None:
        """Send queued answers, and answer new requests."""
        try:
            if what & selectors.EVENT_WRITE:
                reader.socket.flush()
            if what & selectors.EVENT_READ:
                for message in reader.socket.receive():
                    self._hear(reader, m.decode_from_reader(message))
            self._watch(reader)
        except SocketClosed:
            self._drop(reader)
        except RunError as error:
            self.refused[reader.peer] += 1
            _log.warning("%s: request refused, its connection is closed: %s", reader.peer, error)
            self._drop(reader)

    def _hear(self, reader: ServedPeer, message: m.FromReader) -> None:
        if isinstance(message, FetchRequest):
            self._answer(reader, message)
        elif self.on_send is not None:
            self.on_send(reader.peer, message.sequence, message.requests(self._name))
        else:
            problem = f"asks for tensors of {len(message.wanted)} blocks"
            raise RunError(f"{problem}, and none are sent from here")

    def _answer(self, reader: ServedPeer, request: FetchRequest) -> None:
        answers: list[Answer] = []
        if request.content:
            self._outbox.sum_up(request.wanted)
        with self._outbox.lock:  # no slab goes until the descriptors are sent or duplicated
            for wanted in request.wanted:
                answer, slabs, layout = self._outbox.describe(wanted)
                for slab in slabs:
                    self._introduce(reader, slab)
                if layout is not None and layout.hash not in reader.schemas:
                    reader.schemas.add(layout.hash)
                    reader.socket.send(encode(m.SchemaHere(layout.hash, layout.encoded)))
                answers.append(answer)
        reader.socket.send(encode(Reply(request.id, answers)))

    def _introduce(self, reader: ServedPeer, slab: Slab) -> None:
        """Send a slab's descriptor, once."""
        if slab.number not in reader.slabs:
            reader.slabs.add(slab.number)
            message = m.SlabHere(slab.number, slab.size, slab.on_disk)
            reader.socket.send(encode(message), slab.descriptor)

    def _watch(self, reader: ServedPeer) -> None:
        wanted = 0
        if reader.socket.waiting < ENOUGH:
            wanted |= selectors.EVENT_READ
        if reader.socket.waiting:
            wanted |= selectors.EVENT_WRITE
        if self._selector.get_key(reader.socket.socket).events != wanted:
            self._selector.modify(reader.socket.socket, wanted, reader)

    def _drop(self, reader: ServedPeer) -> None:
        self._served.remove(reader)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(reader.socket.socket)
        reader.socket.close()
