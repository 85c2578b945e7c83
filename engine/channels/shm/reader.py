"""The reading end of a connection to one Worker's outbox.

Owns: the slabs of that peer that are mapped here, its schemas, and the checks of what it says
before anything is read. Does not own: framing (packets.py), whom to ask (shm.py).

Whatever comes is taken for possibly wrong: sizes are those of the descriptor (fstat), places lie
within them, arrays fit their schema and are validated in full; with `content` each buffer has its
checksum. Numbers are bounded before anything is allocated or mapped.
"""

from __future__ import annotations

import mmap
import os
import socket
import stat
import time
from collections.abc import Sequence

import pyarrow as pa

from dataflow.errors import DataError, RunError
from engine.channels.contract import BlockRequest, PeerLost
from engine.channels.frames import SchemaLayout, checked_together, checksums, chosen, forms_from
from engine.channels.projection import of_rows
from engine.channels.shm.block_index import SIZE, noted
from engine.channels.shm.fd_socket import FdSocket, SocketClosed
from engine.channels.shm.messages import (
    Ask,
    BlockLocation,
    BoardHere,
    Fetch,
    Lacks,
    Reply,
    ShapeHere,
    SlabGone,
    SlabHere,
    Unknown,
    decode_from_owner,
    decode_lies,
    encode,
    send_of,
)
from engine.channels.shm.slabs import is_sealed


class SlabReader:
    """Rows of one peer's blocks, as views of its slabs. Not for several threads at once."""

    def __init__(self, peer: str, connection: socket.socket, *, content: bool) -> None:
        self.peer = peer
        self._packets = FdSocket(connection)
        self._content = content
        self._slabs: dict[int, pa.Buffer] = {}
        self._shapes: dict[int, SchemaLayout] = {}
        self._board: pa.Buffer | None = None
        self._last = 0
        self.broken = False
        """Whether it is of no use any more: the peer is gone, or what it says cannot be right."""

    def look(self, request: BlockRequest) -> pa.RecordBatch | None:
        """The rows, where the peer's board says where they lie and all of that is known here; None:
        it has to be asked.

        Raises DataError, and RunError for a note that cannot be right.
        """
        note = None if self._board is None else noted(self._board, request.block)
        if note is None:
            return None
        lies = decode_lies(note)
        forms = self._shapes.get(lies.shape)
        unmapped = {slab for slab, _, length in lies.places if length}.difference(self._slabs)
        if forms is None or unmapped or (self._content and not lies.sums):
            return None
        return self._rows(self._of_columns(lies, forms, request), request)

    def ask(self, requests: Sequence[BlockRequest]) -> int:
        """Ask for blocks; returns the number of the request. Raises PeerLost."""
        self._last += 1
        asks = tuple(Ask(r.block, tuple(r.columns), self._content) for r in requests)
        try:
            self._packets.send(encode(Fetch(self._last, asks)))
        except SocketClosed as closed:
            raise self._lost(closed) from closed
        return self._last

    def answer(
        self, number: int, requests: Sequence[BlockRequest], deadline: float
    ) -> list[pa.RecordBatch]:
        """What was asked for under this number, before this monotonic time.

        Raises PeerLost, KeyError, DataError, and RunError for an answer that cannot be right.
        """
        reply = self._reply(number, deadline)
        if len(reply.answers) != len(requests):
            raise self._wrong(f"expected {len(requests)} answers, found {len(reply.answers)}")
        return [
            self._rows(answer, request)
            for answer, request in zip(reply.answers, requests, strict=True)
        ]

    def have_sent(self, sequence: int, requests: Sequence[BlockRequest], deadline: float) -> None:
        """Ask for tensors of blocks, which come by another way, before this monotonic time. Raises
        PeerLost.
        """
        try:
            self._packets.send(encode(send_of(sequence, requests)))
            taken = self._packets.drain(deadline)
        except SocketClosed as closed:
            raise self._lost(closed) from closed
        if not taken:
            self.broken = True
            raise PeerLost(self.peer, "did not take a request in time. Fix: see what it is doing")

    def hear(self) -> list[Reply]:
        """Take whatever came and does not have to be waited for; returns replies."""
        try:
            taken = [self._take(decode_from_owner(message)) for message in self._packets.receive()]
        except SocketClosed as closed:
            raise self._lost(closed) from closed
        except RunError:
            self.broken = True
            raise
        return [reply for reply in taken if reply is not None]

    def close(self) -> None:
        """Close the connection. Mappings go with the last view of them."""
        self._packets.close()
        self._slabs.clear()
        self._board = None

    def __len__(self) -> int:
        return len(self._slabs)

    # --- messages ---------------------------------------------------------------------------------

    def _reply(self, number: int, deadline: float) -> Reply:
        """The reply to this request; those to earlier ones, which nobody waits for any more, are
        dropped.
        """
        while True:
            try:
                there = self._packets.wait(deadline)
            except SocketClosed as closed:
                raise self._lost(closed) from closed
            if not there:
                self.broken = True
                raise PeerLost(
                    self.peer,
                    "did not answer in time where its rows are. Fix: see what it is doing",
                )
            for reply in self.hear():
                if reply.id == number:
                    return reply

    def _take(self, message: BoardHere | SlabHere | SlabGone | ShapeHere | Reply) -> Reply | None:
        match message:
            case Reply():
                if message.id > self._last:
                    raise self._wrong(
                        f"expected an answer to request {self._last}, found one to {message.id}"
                    )
                return message
            case SlabHere():
                self._slabs[message.number] = self._mapped(
                    f"slab {message.number}", message.size, message.on_disk
                )
            case BoardHere():
                if message.size != SIZE:
                    raise self._wrong(f"a board of {message.size} bytes, expected {SIZE}")
                self._board = self._mapped("its board", SIZE, on_disk=False)
            case SlabGone():
                for slab in message.numbers:
                    self._slabs.pop(slab, None)
            case ShapeHere():
                forms = forms_from(message.data)
                if forms.hash != message.hash:
                    raise self._wrong("a schema that was changed on its way")
                self._shapes[message.hash] = forms
        return None

    def _mapped(self, what: str, size: int, on_disk: bool) -> pa.Buffer:
        """Memory mapped for reading, if its descriptor is what the peer says it is."""
        if not self._packets.descriptors:
            raise self._wrong(f"{what} without its descriptor")
        descriptor = self._packets.descriptors.popleft()
        try:
            found = os.fstat(descriptor)
            named_file = found.st_nlink > 0 if on_disk else not is_sealed(descriptor)
            if found.st_size != size or not stat.S_ISREG(found.st_mode) or not size or named_file:
                raise self._wrong(
                    f"{what}: expected {size} bytes that nobody can take away, found"
                    f" {found.st_size} bytes of mode {found.st_mode:o}"
                )
            flags = mmap.MAP_SHARED | (0 if on_disk else mmap.MAP_POPULATE)
            return pa.py_buffer(mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ))
        except OSError as error:
            raise RunError(
                f"{self.peer}: {what} of {size} bytes cannot be mapped: {error}"
            ) from error
        finally:
            os.close(descriptor)

    # --- rows -------------------------------------------------------------------------------------

    def _rows(
        self, answer: BlockLocation | Unknown | Lacks, request: BlockRequest
    ) -> pa.RecordBatch:
        if answer.block != request.block:
            raise self._wrong(f"expected block {request.block}, found {answer.block}")
        match answer:
            case Unknown() if answer.epoch > request.block >> 32:
                raise PeerLost(
                    self.peer,
                    f"its process that kept block {request.block} is gone, and another answers",
                )
            case Unknown():
                raise KeyError(request.block)
            case Lacks():
                raise DataError(answer.error)
            case BlockLocation():
                return of_rows(self._columns(answer, request), request.rows)

    def _of_columns(
        self, lies: BlockLocation, forms: SchemaLayout, request: BlockRequest
    ) -> BlockLocation:
        """A note of all columns, cut down to those asked for."""
        if not request.columns:
            return lies
        _, index = chosen(forms, tuple(request.columns))
        node, buffer = forms.node, forms.buffer
        sums = lies.sums or [0] * len(lies.places)
        if not len(lies.nodes) == node[-1] or not len(lies.places) == len(sums) == buffer[-1]:
            raise self._wrong(f"a note of block {lies.block} that does not fit its schema")
        return BlockLocation(
            lies.block,
            lies.rows,
            lies.shape,
            [n for i in index for n in lies.nodes[node[i] : node[i + 1]]],
            [p for i in index for p in lies.places[buffer[i] : buffer[i + 1]]],
            [s for i in index for s in sums[buffer[i] : buffer[i + 1]]],
        )

    def _columns(self, lies: BlockLocation, request: BlockRequest) -> pa.RecordBatch:
        forms = self._shapes.get(lies.shape)
        if forms is None:
            raise self._wrong(f"block {lies.block} is of a schema that was never told")
        forms, _ = chosen(forms, tuple(request.columns))
        buffers = [self._buffer(*place) if place[2] else None for place in lies.places]
        if self._content and checksums(buffers) != lies.sums:
            raise self._wrong(f"block {lies.block}: its content is not what its owner kept")
        try:
            return checked_together(forms, lies.rows, lies.nodes, buffers)
        except RunError as error:
            raise self._wrong(f"block {lies.block}: {error}") from error

    def _buffer(self, number: int, offset: int, length: int) -> pa.Buffer:
        slab = self._slabs.get(number)
        if slab is None or offset + length > slab.size:
            size = "that is not mapped" if slab is None else f"of {slab.size} bytes"
            raise self._wrong(f"{length} bytes at {offset} of slab {number} {size}")
        return slab.slice(offset, length)

    def _wrong(self, found: str) -> RunError:
        self.broken = True
        return RunError(
            f"{self.peer}: refused: {found}. Fix: both ends have to be of one build of the engine."
        )

    def _lost(self, closed: SocketClosed) -> PeerLost:
        self.broken = True
        return PeerLost(self.peer, f"its process is gone ({closed})")


def deadline_in(seconds: float) -> float:
    """A moment of the monotonic clock."""
    return time.monotonic() + seconds
