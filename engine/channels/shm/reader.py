"""The reading end of a connection to one Worker's outbox.

Owns: that peer's mapped slabs and schemas, and every check of its messages. Does not own: framing
(fd_socket.py), whom to ask (peers.py).

No message is trusted: sizes are those of fstat, places lie within them, arrays fit their schema and
are validated in full, with `content` each buffer matches its checksum. Numbers are bounded before
anything is allocated or mapped.
"""

from __future__ import annotations

import mmap
import os
import socket
import stat

import pyarrow as pa

from dataflow.errors import RunError
from engine.channels import block_requests as h
from engine.channels.contract import BlockRequest, PeerLost, Requests
from engine.channels.layout import SchemaLayout, layout_from, select_layout
from engine.channels.peers import PeerReader
from engine.channels.projection import select_rows
from engine.channels.shm import messages as m
from engine.channels.shm.block_index import SIZE, read_note
from engine.channels.shm.fd_socket import FdSocket, SocketClosed
from engine.channels.shm.slabs import is_sealed


class SlabReader(PeerReader):
    """Rows of one peer's blocks, as views of its slabs. Not for several threads at once."""

    def __init__(self, peer: str, connection: socket.socket, *, content: bool) -> None:
        super().__init__(peer)
        self._socket = FdSocket(connection)
        self._content = content
        self._slabs: dict[int, pa.Buffer] = {}
        self._schemas: dict[bytes, SchemaLayout] = {}
        self._index: pa.Buffer | None = None

    def __len__(self) -> int:
        return len(self._slabs)

    def look(self, request: BlockRequest) -> pa.RecordBatch | None:
        """The rows, if block index, slabs and schemas here suffice. Raises DataError, RunError."""
        if self._index is None:
            return None
        note = read_note(self._index, request.block)
        if note is None:
            return None
        header = h.header_of(note)
        layout = self._schemas.get(header.schema)
        mapped = self._slabs.keys() >= {slab for slab, _, length in header.places if length}
        if layout is None or not mapped or (self._content and not header.sums):
            return None
        try:
            header, layout = h.narrow_header(header, layout, tuple(request.columns))
        except RunError as error:
            raise self.mark_invalid(error) from error
        return self._rows(header, request, layout)

    def ask(self, requests: Requests) -> int:
        """See PeerReader."""
        self._last += 1
        # Without rows: the whole block is mapped, and rows are selected here.
        wanted = [h.Wanted(request.block, tuple(request.columns)) for request in requests]
        self._send(h.FetchRequest(self._last, tuple(wanted), self._content))
        return self._last

    def answer(self, number: int, requests: Requests, deadline: float) -> list[pa.RecordBatch]:
        """See PeerReader."""
        reply = self._reply(number, deadline)
        if len(reply.answers) != len(requests):
            raise self.mark_invalid(f"expected {len(requests)} answers, found {len(reply.answers)}")
        return [self._rows(a, r) for a, r in zip(reply.answers, requests, strict=True)]

    def have_sent(self, sequence: int, requests: Requests, deadline: float) -> None:
        """Ask for tensors, which come over tensors/pairs.py. Raises PeerLost."""
        self._send(m.SendTensors.of(sequence, requests))
        try:
            taken = self._socket.drain(deadline)
        except SocketClosed as closed:
            raise self._gone(closed) from closed
        if not taken:
            raise self.mark_lost("did not take a request in time. Fix: see what it is doing")

    def hear(self) -> None:
        """Handle unrequested messages; replies that nobody waits for are dropped."""
        self._replies()

    def close(self) -> None:
        """Close the connection. Mappings go with the last view of them."""
        self._socket.close()
        self._slabs.clear()
        self._index = None

    def _send(self, message: h.FetchRequest | m.SendTensors) -> None:
        try:
            self._socket.send(h.encode(message))
        except SocketClosed as closed:
            raise self._gone(closed) from closed

    def _reply(self, number: int, deadline: float) -> h.Reply:
        """The reply to this request; replies to earlier ones are dropped."""
        while True:
            try:
                has_data = self._socket.wait(deadline)
            except SocketClosed as closed:
                raise self._gone(closed) from closed
            if not has_data:
                raise self.mark_lost(
                    "did not say in time where its rows are. Fix: see what it is doing"
                )
            for reply in self._replies():
                if reply.id == number:
                    return reply

    def _replies(self) -> list[h.Reply]:
        """Handle every message that has arrived; returns the replies."""
        try:
            taken = [self._take(m.decode_from_owner(message)) for message in self._socket.receive()]
        except SocketClosed as closed:
            raise self._gone(closed) from closed
        except RunError:
            self.broken = True
            raise
        return [reply for reply in taken if reply is not None]

    def _take(self, message: m.FromOwner) -> h.Reply | None:
        match message:
            case h.Reply():
                if message.id > self._last:
                    expected = f"expected an answer to request {self._last}"
                    raise self.mark_invalid(f"{expected}, found one to {message.id}")
                return message
            case m.SlabHere(number=slab):
                self._slabs[slab] = self._map_descriptor(
                    f"slab {slab}", message.size, message.on_disk
                )
            case m.IndexHere():
                if message.size != SIZE:
                    raise self.mark_invalid(
                        f"a block index of {message.size} bytes, expected {SIZE}"
                    )
                self._index = self._map_descriptor("its block index", SIZE, on_disk=False)
            case m.SlabsGone():
                for slab in message.numbers:
                    self._slabs.pop(slab, None)
            case m.SchemaHere():
                layout = layout_from(message.data)
                if layout.hash != message.hash:
                    raise self.mark_invalid("a schema that was changed on its way")
                self._schemas[message.hash] = layout
        return None

    def _map_descriptor(self, what: str, size: int, on_disk: bool) -> pa.Buffer:
        """Map a descriptor for reading, if it is what the peer says it is."""
        if not self._socket.descriptors:
            raise self.mark_invalid(f"{what} without its descriptor")
        descriptor = self._socket.descriptors.popleft()
        try:
            status = os.fstat(descriptor)
            # Reading memory that its owner has cut off would kill this process (SIGBUS).
            fixed = not status.st_nlink if on_disk else is_sealed(descriptor)
            if status.st_size != size or not stat.S_ISREG(status.st_mode) or not size or not fixed:
                kind = f"{status.st_size} bytes of mode {status.st_mode:o}"
                raise self.mark_invalid(
                    f"{what}: expected {size} bytes of fixed size, found {kind}"
                )
            flags = mmap.MAP_SHARED
            if not on_disk:
                flags |= mmap.MAP_POPULATE
            return pa.py_buffer(mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ))
        except OSError as error:
            problem = f"{what} of {size} bytes cannot be mapped: {error}"
            raise RunError(f"{self.peer}: {problem}") from error
        finally:
            os.close(descriptor)

    def _gone(self, closed: SocketClosed) -> PeerLost:
        return self.mark_lost(f"its process is gone ({closed})")

    def _rows(
        self, answer: h.Answer, request: BlockRequest, layout: SchemaLayout | None = None
    ) -> pa.RecordBatch:
        try:
            header = h.require_header(answer, request)
            layout = layout or self._layout(header, tuple(request.columns))
            rows = h.assemble_rows(header, layout, self._buffer, content=self._content)
        except PeerLost:
            raise
        except RunError as error:
            raise self.mark_invalid(error) from error
        return select_rows(rows, request.rows)

    def _layout(self, header: h.BlockHeader, columns: tuple[str, ...]) -> SchemaLayout:
        layout = self._schemas.get(header.schema)
        if layout is None:
            raise RunError(f"block {header.block} has a schema that was never sent")
        return select_layout(layout, columns)[0]

    def _buffer(self, number: int, offset: int, length: int) -> pa.Buffer:
        slab = self._slabs.get(number)
        if slab is None:
            raise RunError(f"{length} bytes at {offset} of slab {number} that is not mapped")
        if offset + length > slab.size:
            problem = f"{length} bytes at {offset} of slab {number} of {slab.size} bytes"
            raise RunError(problem)
        return slab.slice(offset, length)
