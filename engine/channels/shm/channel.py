"""The pull channel of one host: rows stay in the producer's slabs, which readers map.

Owns: both ends of one Worker: its outbox and its connections. Does not own: the socket pairs (the
Supervisor makes them), slabs (slabs.py), messages (messages.py).

    fetch waits for                                      unblocked by
    the reply of a peer whose block index lacks a block  that peer's server thread, or its end

A block is copied into a slab once, or built there (`allocate`); reading copies only row subsets.
Once a block is released, its slab is used again without notice.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pyarrow as pa

from engine.channels.contract import BlockRequest, PeerLost, Requests
from engine.channels.peers import PATIENCE, PeerReaders
from engine.channels.projection import select_rows
from engine.channels.shm.outbox import SlabOutbox
from engine.channels.shm.reader import SlabReader
from engine.channels.shm.server import SlabServer
from engine.channels.shm.slabs import SlabPool

Dial = Callable[[str], socket.socket]
"""A peer's name -> a connected AF_UNIX stream socket, which that peer's channel serves."""


class ShmChannel:
    """Outbox (see SlabOutbox) and pull channel of one Worker of several on a host.

    limit: bytes of slabs in memory (None: a quarter of the machine's), beyond which blocks go to
    unlinked files in `directory` (None: the system's). verify: with `content` every buffer has a
    checksum. poison: fill freed memory with 0xA5, for tests.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        dial: Dial,
        *,
        limit: int | None = None,
        directory: Path | None = None,
        verify: Literal["structure", "content"] = "structure",
        patience: float = PATIENCE,
        poison: bool = False,
    ) -> None:
        self.name = name
        self._dial = dial
        self._content = verify == "content"
        if limit is None:
            limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
        self._pool = SlabPool(limit=limit, directory=directory, poison=poison)
        self._outbox = outbox = SlabOutbox(self._pool, epoch, content=self._content)
        self.keep, self.allocate, self.release = outbox.keep, outbox.allocate, outbox.release
        self._server = SlabServer(name, outbox)
        self._pool.on_gone = self._server.wake
        self._peers = PeerReaders(name, self._connect, patience=patience)

    def __len__(self) -> int:
        return len(self._outbox)

    @property
    def nbytes(self) -> int:
        """Bytes of the outbox in memory; from any thread."""
        return self._pool.nbytes

    @property
    def spilled_bytes(self) -> int:
        """Bytes of the outbox in files."""
        return self._pool.spilled

    @property
    def refusals(self) -> dict[str, int]:
        """Messages of each peer that were refused."""
        return dict(self._peers.refused + self._server.refused)

    def serve(self, peer: str, connection: socket.socket) -> None:
        """Let a peer that dialled us read over this socket; from any thread."""
        self._server.serve(peer, connection)

    def fetch(self, requests: Requests) -> list[pa.RecordBatch]:
        """See engine/channels/contract.py."""
        return self._peers.fetch(requests, self._own)

    def fetch_beside(self, requests: Requests) -> list[pa.RecordBatch]:
        """The same: nothing travels here, and no fetch takes long."""
        return self.fetch(requests)

    def have_sent(self, peer: str, sequence: int, requests: Requests) -> None:
        """Ask a peer to send tensors of its blocks; see tensors/pairs.py. Raises PeerLost."""
        deadline = self._peers.deadline()
        self._peers.use(peer, lambda reader: reader.have_sent(sequence, requests, deadline))

    def require(self, peer: str) -> None:
        """Raises PeerLost if the peer or its process has closed its end."""
        self._peers.use(peer, SlabReader.hear)

    def require_answer(self, peer: str) -> None:
        """Raises PeerLost unless the peer's channel answers, as it does whatever its kernels do."""
        deadline = self._peers.deadline()
        self._peers.use(peer, lambda reader: reader.answer(reader.ask([]), [], deadline))

    def send_by(self, on_send: Callable[[str, int, Requests], None]) -> None:
        """Set what is called, (peer, sequence, requests), when a peer asks for tensors."""
        self._server.on_send = on_send

    def fail_by(self, on_failure: Callable[[BaseException], None]) -> None:
        """Set what is called with the error that ends the thread, which answers no peer then."""
        self._server.on_failure = on_failure

    def close(self) -> None:
        """Release all resources: the thread, connections, slabs."""
        self._server.close()
        self._peers.close()
        self._outbox.close()

    def _own(self, request: BlockRequest) -> pa.RecordBatch:
        return select_rows(
            self._outbox.records(request.block, tuple(request.columns)), request.rows
        )

    def _connect(self, peer: str) -> SlabReader:
        try:
            connection = self._dial(peer)
        except OSError as error:
            raise PeerLost(peer, f"cannot be reached: {error}") from error
        return SlabReader(peer, connection, content=self._content)
