"""Blocks of rows in slabs: the outbox of a Worker that others of the host read.

Owns: block numbers, which regions a block lies in, arrays that kernels build in place, one copy
of everything else. Does not own: slabs (slabs.py), peers (server.py).

Called from several threads: the one that runs kernels, the one that hears releases, the one that
answers.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import DataError, StorageError
from engine.channels.frames import (
    SchemaLayout,
    checksums,
    chosen,
    copy_summed,
    put_together,
    taken_apart,
)
from engine.channels.shm.block_index import SIZE, BlockIndex
from engine.channels.shm.messages import Ask, BlockLocation, Lacks, Unknown, encode
from engine.channels.shm.slabs import ALIGNMENT, Region, Slab, SlabPool

Place = tuple[Slab, int, int]
"""(slab, offset, length) of a buffer."""


@dataclass(slots=True, kw_only=True, eq=False)
class KeptBlock:
    """A kept batch. `places` is None where a buffer is not there."""

    forms: SchemaLayout
    rows: int
    nodes: list[tuple[int, int]]
    places: list[Place | None]
    regions: list[Region]
    sums: list[int] = field(default_factory=list)


class SlabOutbox:
    """Keeps batches in slabs. epoch: the Worker's incarnation; blocks are numbered from epoch <<
    32. content: checksums are made where a batch is kept, as readers will ask for them.
    """

    def __init__(self, pool: SlabPool, epoch: int, *, content: bool = False) -> None:
        self.lock = threading.RLock()
        """Held while a block's places are used to send: no slab goes meanwhile."""
        self.pool = pool
        self.board = _board()
        self._epoch = epoch
        self._content = content
        self._numbers = itertools.count(epoch << 32)
        self._blocks: dict[int, KeptBlock] = {}
        self._built: list[Region] = []
        """By where they begin, which `_starts` has in the same order."""
        self._starts: list[int] = []
        self._dropped: deque[Region] = deque()

    def __len__(self) -> int:
        return len(self._blocks)

    def allocate(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] in a slab, on a 64-byte boundary; Arrow arrays over it are not copied when
        they are kept.

        Its contents are whatever was there. It must not be changed once a batch that uses it was
        kept.
        """
        if not nbytes:
            return np.empty(0, np.uint8)
        with self.lock:
            self._collect()
            region = self.pool.allocate(nbytes)
            at = bisect_right(self._starts, _start(region))
            self._built.insert(at, region)
            self._starts.insert(at, _start(region))
        array = region.bytes()
        # The array may die in any thread at any moment, so it only leaves a note.
        weakref.finalize(array, self._dropped.append, region).atexit = False
        return array

    def keep(self, batch: Batch) -> int:
        """Copy a batch into a slab, but for what was built there. Raises DataError for a type that
        does not travel.
        """
        framed = taken_apart(batch.records)
        with self.lock:
            self._collect()
            lies, held = self._already_there(framed.buffers)
            length = sum(
                _room(b) for b, there in zip(framed.buffers, lies, strict=True) if there is None
            )
            region = self.pool.allocate(length) if length else None
        sums: list[int] | None = None
        if self._content:
            sums = checksums(
                [b if there else None for b, there in zip(framed.buffers, lies, strict=True)]
            )
        if region is not None:
            _copy(framed.buffers, lies, region, sums)
            held.append(region)
        block = KeptBlock(
            forms=framed.forms,
            rows=framed.rows,
            nodes=framed.nodes,
            places=lies,
            regions=held,
            sums=sums or [],
        )
        with self.lock:
            number = next(self._numbers)
            self._blocks[number] = block
            self.board.note(
                number,
                encode(_lies(number, block, block.forms, block.nodes, block.places, block.sums)),
            )
        return number

    def release(self, number: int) -> None:
        """Forget a block. Raises KeyError where there is none."""
        with self.lock:
            self._collect()
            self.board.wipe(number)
            for region in self._blocks.pop(number).regions:
                self.pool.let_go(region)

    def records(self, number: int, columns: tuple[str, ...]) -> pa.RecordBatch:
        """A block's columns as views of the slab. Raises KeyError, and DataError for a column that
        is not there.
        """
        with self.lock:
            block = self._blocks[number]
            forms, nodes, lies, _ = _chosen(block, columns)
            buffers = [None if p is None else p[0].buffer.slice(p[1], p[2]) for p in lies]
        return put_together(forms, block.rows, nodes, buffers)

    def sum_up(self, asks: Sequence[Ask]) -> None:
        """Make the checksums that these ask for and that are not there yet, without the lock: a
        block that is released meanwhile is Unknown afterwards, whatever its sums are.
        """
        for ask in asks:
            block = self._blocks.get(ask.block) if ask.content else None
            if block is not None:
                _sum_up(block)

    def describe(
        self, ask: Ask
    ) -> tuple[BlockLocation | Unknown | Lacks, list[Slab], SchemaLayout | None]:
        """Where the columns asked for lie, in which slabs, and of which schema. The caller holds
        the lock, and has summed up what it asks about, so that nobody else waits for that.
        """
        block = self._blocks.get(ask.block)
        if block is None:
            return Unknown(ask.block, self._epoch), [], None
        try:
            _, nodes, lies, index = _chosen(block, ask.columns)
        except DataError as error:
            return Lacks(ask.block, str(error)), [], None
        sums = _sums(block, index) if ask.content else []
        slabs = list({p[0].number: p[0] for p in lies if p is not None}.values())
        return _lies(ask.block, block, block.forms, nodes, lies, sums), slabs, block.forms

    def close(self) -> None:
        """Forget every block and close every slab."""
        with self.lock:
            self._blocks.clear()
            self._built.clear()
            self._starts.clear()
            self.pool.close()
            self.board.close()

    def _collect(self) -> None:
        """Let go of built regions whose arrays are gone."""
        while self._dropped:
            region = self._dropped.popleft()
            at = bisect_right(self._starts, _start(region)) - 1
            if at >= 0 and self._built[at] is region:
                del self._built[at], self._starts[at]
                self.pool.let_go(region)

    def _already_there(
        self, buffers: list[pa.Buffer | None]
    ) -> tuple[list[Place | None], list[Region]]:
        """The places of buffers that were built in a slab, and a hold of each region that they lie
        in.
        """
        if not self._built:
            return [None] * len(buffers), []
        lies: list[Place | None] = []
        held: list[Region] = []
        for buffer in buffers:
            size = 0 if buffer is None else buffer.size
            address = buffer.address if buffer is not None and size else 0
            at = bisect_right(self._starts, address) - 1
            if at < 0 or address + size > self._starts[at] + self._built[at].length:
                lies.append(None)
                continue
            region = self._built[at]
            lies.append((region.slab, region.offset + address - self._starts[at], size))
            if region not in held:
                region.holds += 1
                held.append(region)
        return lies, held


def _room(buffer: pa.Buffer | None) -> int:
    return 0 if buffer is None else -(-buffer.size // ALIGNMENT) * ALIGNMENT


def _start(region: Region) -> int:
    return region.slab.buffer.address + region.offset


def _copy(
    buffers: list[pa.Buffer | None],
    lies: list[Place | None],
    region: Region,
    sums: list[int] | None,
) -> None:
    """Copy what is nowhere yet into the region, and say where it lies, with its checksum where
    there are any.
    """
    memory, at = region.bytes(), 0
    for index, buffer in enumerate(buffers):
        if buffer is None or not buffer.size or lies[index] is not None:
            continue
        target = memory[at : at + buffer.size]
        if sums is None:
            target[:] = np.frombuffer(buffer, np.uint8)
        else:
            sums[index] = copy_summed(buffer, target)
        lies[index] = (region.slab, region.offset + at, buffer.size)
        at += _room(buffer)


def _chosen(
    block: KeptBlock, columns: tuple[str, ...]
) -> tuple[SchemaLayout, list[tuple[int, int]], list[Place | None], Sequence[int]]:
    """The layout, nodes and places of the columns asked for, and their indices."""
    forms, index = chosen(block.forms, columns)
    if not columns:
        return forms, block.nodes, block.places, index
    node, buffer = block.forms.node, block.forms.buffer
    nodes = [n for i in index for n in block.nodes[node[i] : node[i + 1]]]
    return forms, nodes, [p for i in index for p in block.places[buffer[i] : buffer[i + 1]]], index


def _lies(
    number: int,
    block: KeptBlock,
    forms: SchemaLayout,
    nodes: list[tuple[int, int]],
    places: list[Place | None],
    sums: list[int],
) -> BlockLocation:
    """What readers are told of these columns."""
    told = [(0, 0, 0) if p is None else (p[0].number, p[1], p[2]) for p in places]
    return BlockLocation(number, block.rows, forms.hash, nodes, told, sums)


def _sums(block: KeptBlock, index: Sequence[int]) -> list[int]:
    """Checksums of the buffers of these columns."""
    _sum_up(block)
    buffer = block.forms.buffer
    return [s for i in index for s in block.sums[buffer[i] : buffer[i + 1]]]


def _sum_up(block: KeptBlock) -> None:
    """Make a block's checksums, once."""
    if not block.sums:
        block.sums = checksums(
            [None if p is None else p[0].buffer.slice(p[1], p[2]) for p in block.places]
        )


def _board() -> BlockIndex:
    try:
        return BlockIndex()
    except OSError as error:
        fix = "fewer Workers, a machine with more memory, or more open files (ulimit -n)"
        raise StorageError(
            f"outbox: expected {SIZE >> 20} MiB for its board, found: {error}. Fix: {fix}."
        ) from error
