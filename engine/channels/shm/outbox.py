"""Blocks of rows in slabs: the outbox that other Workers of the host read.

Owns: block numbers, the regions of each block, arrays that kernels build in place, one copy of
everything else. Does not own: slabs (slabs.py), peers (server.py). Callable from any thread.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from dataflow.batch import Batch
from dataflow.errors import DataError, StorageError
from engine.channels import block_requests as h
from engine.channels.frames import Buffers, checksums, copy_summed, put_together, take_apart
from engine.channels.layout import SchemaLayout
from engine.channels.shm.block_index import SIZE, BlockIndex
from engine.channels.shm.slabs import ALIGNMENT, Region, Slab, SlabPool


@dataclass(slots=True, kw_only=True, eq=False)
class KeptBlock:
    """A kept batch: its header and its memory."""

    header: h.BlockHeader
    layout: SchemaLayout
    regions: list[Region]
    slabs: dict[int, Slab]

    def buffers(self, header: h.BlockHeader) -> Buffers:
        """The buffers that a header of this block, or of some of its columns, describes."""
        return [self.slabs[s].buffer.slice(at, n) if n else None for s, at, n in header.places]


class SlabOutbox:
    """Keeps batches in slabs. epoch: the Worker's incarnation; its blocks begin at epoch << 32.
    content: compute checksums when a batch is kept, because readers will want them.
    """

    def __init__(self, pool: SlabPool, epoch: int, *, content: bool = False) -> None:
        self.lock = threading.RLock()
        """Held while a block's places are sent, so that no slab goes."""
        self.pool = pool
        self.index = _index()
        self._epoch = epoch
        self._content = content
        self._numbers = itertools.count(epoch << 32)
        self._blocks: dict[int, KeptBlock] = {}
        self._built: list[Region] = []
        """Sorted by address; `_starts` has the addresses."""
        self._starts: list[int] = []
        self._dropped: deque[Region] = deque()

    def __len__(self) -> int:
        return len(self._blocks)

    def allocate(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] in a slab, on a 64-byte boundary; see engine/channels/contract.py."""
        if not nbytes:
            return np.empty(0, np.uint8)
        with self.lock:
            self._collect()
            region = self.pool.allocate(nbytes)
            at = bisect_right(self._starts, _start(region))
            self._built.insert(at, region)
            self._starts.insert(at, _start(region))
        array = region.bytes()
        # The array may be collected in any thread at any moment, without the lock.
        weakref.finalize(array, self._dropped.append, region).atexit = False
        return array

    def keep(self, batch: Batch) -> int:
        """Keep a batch, copying what was not built in a slab. Raises DataError."""
        parts = take_apart(batch.records)
        with self.lock:
            self._collect()
            places, held = self._already_there(parts.buffers)
            to_copy: Buffers = []
            built: Buffers = []  # as long: each buffer is in one of them, and None in the other
            for buffer, (_, _, length) in zip(parts.buffers, places, strict=True):
                to_copy.append(None if length else buffer)
                built.append(buffer if length else None)
            size = sum(map(_room, to_copy))
            region = self.pool.allocate(size) if size else None
        # Without the lock from here: the region is nobody else's, and a copy takes long.
        sums: list[int] | None = None
        if self._content:
            sums = checksums(built)  # those of what is copied are computed on the way
        if region is not None:
            _copy(to_copy, places, region, sums)
            held.append(region)
        with self.lock:
            number = next(self._numbers)
            layout, slabs = parts.layout, {r.slab.number: r.slab for r in held}
            header = h.BlockHeader(number, parts.rows, layout.hash, parts.nodes, places, sums or [])
            block = KeptBlock(header=header, layout=layout, regions=held, slabs=slabs)
            self._blocks[number] = block
            self.index.note(number, h.encode(header))
        return number

    def release(self, block: int) -> None:
        """Forget a block, whose memory is used again. Raises KeyError."""
        with self.lock:
            self._collect()
            self.index.wipe(block)
            for region in self._blocks.pop(block).regions:
                self.pool.let_go(region)

    def records(self, number: int, columns: tuple[str, ...]) -> pa.RecordBatch:
        """A block's columns as views of its slabs. Raises KeyError, DataError."""
        with self.lock:
            block = self._blocks[number]
            header, layout = h.narrow_header(block.header, block.layout, columns)
            buffers = block.buffers(header)
        return put_together(layout, header.rows, header.nodes, buffers)

    def sum_up(self, wanted: Sequence[h.Wanted]) -> None:
        """Compute missing checksums. Needs no lock: those of a released block are never read."""
        for one in wanted:
            block = self._blocks.get(one.block)
            if block is not None and not block.header.sums:
                sums = checksums(block.buffers(block.header))
                block.header = replace(block.header, sums=sums)

    def describe(self, wanted: h.Wanted) -> tuple[h.Answer, list[Slab], SchemaLayout | None]:
        """The answer to a request, with its slabs and the block's schema. Callers lock."""
        block = self._blocks.get(wanted.block)
        if block is None:
            return h.UnknownBlock(wanted.block, self._epoch), [], None
        try:
            header, _ = h.narrow_header(block.header, block.layout, wanted.columns)
        except DataError as error:
            return h.MissingColumn(wanted.block, str(error)), [], None
        numbers = dict.fromkeys(slab for slab, _, length in header.places if length)
        return header, [block.slabs[number] for number in numbers], block.layout

    def close(self) -> None:
        """Forget every block and close every slab."""
        with self.lock:
            self._blocks.clear()
            self._built.clear()
            self._starts.clear()
            self.pool.close()
            self.index.close()

    def _collect(self) -> None:
        """Free built regions whose arrays are gone."""
        while self._dropped:
            region = self._dropped.popleft()
            at = bisect_right(self._starts, _start(region)) - 1
            if at >= 0 and self._built[at] is region:
                del self._built[at], self._starts[at]
                self.pool.let_go(region)

    def _already_there(self, buffers: Buffers) -> tuple[list[h.Place], list[Region]]:
        """The places of buffers that were built in a slab, and a hold of each region."""
        if not self._built:
            return [h.NOWHERE] * len(buffers), []
        places: list[h.Place] = []
        held: list[Region] = []
        for buffer in buffers:
            size = address = 0
            if buffer is not None and buffer.size:
                size, address = buffer.size, buffer.address
            at = bisect_right(self._starts, address) - 1
            if at < 0 or address + size > self._starts[at] + self._built[at].length:
                places.append(h.NOWHERE)
                continue
            region = self._built[at]
            places.append((region.slab.number, region.offset + address - self._starts[at], size))
            if region not in held:
                region.holds += 1
                held.append(region)
        return places, held


def _room(buffer: pa.Buffer | None) -> int:
    """Bytes that a buffer takes of a region."""
    if buffer is None:
        return 0
    return -(-buffer.size // ALIGNMENT) * ALIGNMENT


def _start(region: Region) -> int:
    return region.slab.buffer.address + region.offset


def _copy(buffers: Buffers, places: list[h.Place], region: Region, sums: list[int] | None) -> None:
    """Copy buffers into a region; fills in their places, and their checksums if wanted."""
    memory, at = region.bytes(), 0
    for index, buffer in enumerate(buffers):
        if buffer is None or not buffer.size:
            continue
        target = memory[at : at + buffer.size]
        if sums is None:
            target[:] = np.frombuffer(buffer, np.uint8)
        else:
            sums[index] = copy_summed(buffer, target)
        places[index] = (region.slab.number, region.offset + at, buffer.size)
        at += _room(buffer)


def _index() -> BlockIndex:
    try:
        return BlockIndex()
    except OSError as error:
        fix = "fewer Workers, a machine with more memory, or more open files (ulimit -n)"
        raise StorageError(
            f"outbox: expected {SIZE >> 20} MiB for its block index, found: {error}. Fix: {fix}."
        ) from error
