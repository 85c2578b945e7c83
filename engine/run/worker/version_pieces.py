"""The pieces of a version, from the Worker that keeps its block, by whatever route.

    route        where the pieces are, once fetched
    pull         in the block: a peer's slabs, which are mapped, or memory of this process
    collective   in tensors of this process, on the device of the pair
    ipc          in the writer's memory on the same GPU: nothing is fetched

Owns: fetching and verifying them, counting their bytes, keeping them for other readers. Does not
own: when this is done (fetched_versions.py), what a module does with them (weight_delivery.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.kernel import Piece
from engine.channels.contract import BlockRequest, Channel, Requests
from engine.channels.tensors.pairs import TensorPairs
from engine.channels.tensors.shared_memories import SharedMemories
from engine.protocol import messages as m
from engine.run.worker.counters import FlowCounts
from engine.weights.flat_copy import read_flat
from engine.weights.hashed_pieces import from_records
from engine.weights.snapshot import make_room, verify_pieces

Pull = Callable[[Requests], list[pa.RecordBatch]]


class FetchedPieces(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Verified pieces, which may be views of a block. start, end: of the fetch, by the monotonic
    clock. block: where this Worker keeps them for other readers; -1 where it does not.
    """

    pieces: Sequence[Piece]
    start: float
    end: float
    block: int = -1

    @property
    def seconds(self) -> float:
        """How long the fetch took."""
        return self.end - self.start


class VersionPieces:
    """Of one Worker. From any thread, but one at a time for a peer."""

    def __init__(
        self,
        worker: str,
        channel: Channel,
        counts: FlowCounts,
        pairs: TensorPairs | None,
        memories: SharedMemories | None,
    ) -> None:
        self._worker = worker
        self._channel = channel
        self._counts = counts
        self._pairs = pairs
        self._memories = memories

    def fetch_beside(self, load: m.Load) -> FetchedPieces:
        """The same as `fetch`, on a thread beside what the Worker does."""
        return self.fetch(load, self._channel.fetch_beside)

    def fetch(self, load: m.Load, pull: Pull | None = None) -> FetchedPieces:
        """Fetch the pieces of a block and verify all of them. Raises PeerLost, and RunError for a
        piece that is not what its writer hashed.
        """
        start, block = time.monotonic(), -1
        request = BlockRequest(worker=load.source, block=load.block)
        pull = pull or self._channel.fetch
        records = pull([request])[0]
        names = records.schema.names
        if "data" in names:
            if load.source != self._worker:  # which it is once it keeps what it has fetched
                self._counts.count_weight_bytes(load.model, load.reader, records.nbytes)
            pieces = list(from_records(records, load.digest))
            if load.keeps:
                positions = range(len(pieces))
                block = self._channel.keep(Batch(Keys.of(positions), records))
        elif "memory" in names:
            pieces = self._read_memory(load, records)
        else:
            pieces = self._receive_tensors(load, request, records)
        return FetchedPieces(pieces=pieces, start=start, end=time.monotonic(), block=block)

    def _receive_tensors(
        self, load: m.Load, request: BlockRequest, records: pa.RecordBatch
    ) -> list[Piece]:
        """Tensors that the writer's Worker keeps beside a block that describes them."""
        assert self._pairs is not None
        if load.source == self._worker:
            return verify_pieces(records, self._pairs.block_tensors(load.block), load.digest)
        arrived = self._pairs.receive(
            load.source, [request], lambda device: make_room(records, device)
        )
        size = sum(tensor.nbytes for tensor in arrived)
        self._counts.count_weight_bytes(load.model, load.reader, size)
        return verify_pieces(records, arrived, load.digest)

    def _read_memory(self, load: m.Load, records: pa.RecordBatch) -> list[Piece]:
        """Views of the writer's memory, on the device that both Workers have."""
        assert self._memories is not None
        map_token = partial(self._memories.map_token, load.source)
        pieces = read_flat(records, map_token, load.digest)
        if load.source != self._worker:
            size = sum(piece.data.nbytes for piece in pieces)
            self._memories.count_read(size)
            self._counts.count_weight_bytes(load.model, load.reader, size)
        return pieces
