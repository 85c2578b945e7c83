"""The pull channel between Workers of one host: rows stay in the producer's slabs, readers map
them.

Owns: both ends of one Worker: its outbox and its connections. Does not own: who is connected with
whom (the Supervisor makes the socket pairs), slabs (slabs.py), what is said (descriptors.py).

    fetch waits for                                    unblocked by
    the reply of each peer whose board (board.py)      that peer's server thread, or the end of its process
    does not say where the rows lie

A block is copied into a slab once, or built there (`allocate`); reading copies nothing but row
subsets. What was read is valid until the block is released: the slab is used again then, and does
not say so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import RunError
from engine.channels.contract import BlockRequest, PeerLost
from engine.channels.projection import of_rows
from engine.channels.shm.outbox import SlabOutbox
from engine.channels.shm.reader import SlabReader, deadline_in
from engine.channels.shm.server import SlabServer
from engine.channels.shm.slabs import SlabPool

_log = logging.getLogger(__name__)

T = TypeVar("T")

Dial = Callable[[str], socket.socket]
"""A peer's name -> a connected AF_UNIX stream socket, at whose other end that peer's channel serves
us.
"""

PATIENCE = 60.0
"""Seconds for an answer that only says where rows lie; a dead process is noticed at once."""


class ShmChannel:
    """Outbox and pull channel of one Worker of several on a host.

    limit: bytes of slabs in memory (None: a quarter of the machine's), beyond which blocks go to
    unlinked files in `directory` (None: the system's). verify: `content` has every buffer checked
    by a checksum. poison: memory that is free again is filled with 0xA5, for tests.
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
        self._patience = patience
        self._pool = SlabPool(
            limit=_quarter() if limit is None else limit, directory=directory, poison=poison
        )
        self._outbox = SlabOutbox(self._pool, epoch, content=self._content)
        self._server = SlabServer(name, self._outbox)
        self._readers: dict[str, SlabReader] = {}
        self._refused: Counter[str] = Counter()
        self._asking = threading.Lock()

    # --- the outbox -------------------------------------------------------------------------------

    def keep(self, batch: Batch) -> int:
        """Keep a batch; copies what was not built in a slab. Raises DataError for a column that
        cannot travel.
        """
        block = self._outbox.keep(batch)
        self._tell_gone()
        return block

    def allocate(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] in a slab: Arrow arrays over it are kept without a copy. See
        SlabOutbox.allocate.
        """
        array = self._outbox.allocate(nbytes)
        self._tell_gone()
        return array

    def release(self, block: int) -> None:
        """Forget a block; its memory is used again."""
        self._outbox.release(block)
        self._tell_gone()

    def __len__(self) -> int:
        return len(self._outbox)

    @property
    def spilled(self) -> int:
        """Bytes of the outbox that lie in files."""
        return self._pool.spilled

    @property
    def nbytes(self) -> int:
        """Bytes of the outbox's slabs in memory, whether used or free."""
        return self._pool.nbytes

    @property
    def refused(self) -> dict[str, int]:
        """How many messages of each peer were refused."""
        return dict(self._refused + self._server.refused)

    # --- peers ------------------------------------------------------------------------------------

    def serve(self, peer: str, connection: socket.socket) -> None:
        """Let a peer that dialled us read over this socket; from any thread."""
        self._server.serve(peer, connection)

    def fetch(self, requests: Sequence[BlockRequest]) -> list[pa.RecordBatch]:
        """See engine/channels/contract.py; raises RunError for an answer that cannot be right, too."""
        found: dict[int, pa.RecordBatch] = {}
        others: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            if request.worker == self.name:
                records = self._outbox.records(request.block, tuple(request.columns))
                found[index] = of_rows(records, request.rows)
            else:
                others.setdefault(request.worker, []).append(index)
        if others:
            with self._asking:
                self._fetch_others(requests, others, found)
        return [found[index] for index in range(len(requests))]

    def have_sent(self, peer: str, sequence: int, requests: Sequence[BlockRequest]) -> None:
        """Ask a peer to send tensors of its blocks; see pairs.py. Raises PeerLost."""
        with self._asking:
            self._from(peer, lambda r: r.have_sent(sequence, requests, deadline_in(self._patience)))

    def require(self, peer: str) -> None:
        """Raises PeerLost where the peer has closed its end, as the end of its process does."""
        with self._asking:
            self._from(peer, SlabReader.hear)

    def send_by(self, on_send: Callable[[str, int, Sequence[BlockRequest]], None]) -> None:
        """What to do where a peer asks for tensors, (peer, sequence, requests); it must not wait."""
        self._server.on_send = on_send

    def close(self) -> None:
        """Let everything go: the thread, connections, slabs."""
        self._server.close()
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._outbox.close()

    def _fetch_others(
        self,
        requests: Sequence[BlockRequest],
        others: dict[str, list[int]],
        found: dict[int, pa.RecordBatch],
    ) -> None:
        """Look at every peer's board, ask those that have to be asked, then take the answers."""
        self._hear_others()
        self._look(requests, others, found)
        if len(found) == len(requests):
            return
        deadline = deadline_in(self._patience)
        left = {
            peer: unseen
            for peer, indices in others.items()
            if (unseen := [i for i in indices if i not in found])
        }
        mine = {peer: [requests[i] for i in indices] for peer, indices in left.items()}
        numbers = {
            peer: self._from(peer, lambda r, m=many: r.ask(m)) for peer, many in mine.items()
        }
        for peer, indices in left.items():
            rows = self._from(peer, lambda r, p=peer: r.answer(numbers[p], mine[p], deadline))
            found.update(zip(indices, rows, strict=True))

    def _look(
        self,
        requests: Sequence[BlockRequest],
        others: dict[str, list[int]],
        found: dict[int, pa.RecordBatch],
    ) -> None:
        """Take what the boards of peers say that is known here: of those nobody has to be asked."""
        for peer, indices in others.items():
            for index in indices:
                rows = self._from(peer, lambda r, i=index: r.look(requests[i]))
                if rows is not None:
                    found[index] = rows

    def _hear_others(self) -> None:
        """Let go of slabs that their owners have given back; whoever is gone is noticed when it is
        asked.
        """
        for peer in list(self._readers):
            with contextlib.suppress(PeerLost):
                self._from(peer, SlabReader.hear)

    def _from(self, peer: str, what: Callable[[SlabReader], T]) -> T:
        """Do something with a peer's connection, which is made anew next time where it fails for
        good.
        """
        reader = self._reader(peer)
        try:
            return what(reader)
        except RunError as error:
            if not isinstance(error, PeerLost):
                self._refused[peer] += 1
                _log.warning("%s", error)
            if reader.broken:
                self._readers.pop(peer).close()
            raise

    def _reader(self, peer: str) -> SlabReader:
        found = self._readers.get(peer)
        if found is None:
            try:
                connection = self._dial(peer)
            except OSError as error:
                raise PeerLost(peer, f"cannot be reached: {error}") from error
            found = self._readers[peer] = SlabReader(peer, connection, content=self._content)
        return found

    def _tell_gone(self) -> None:
        """Have peers told which slabs were given back."""
        if self._pool.has_gone:
            self._server.wake()


def _quarter() -> int:
    """A quarter of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
