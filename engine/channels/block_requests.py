"""Requests for blocks, their answers, and the checks before an answer is used, for every transport.

Owns: these structs and their msgpack form. Does not own: where a buffer's bytes are (each
transport), record batches (frames.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Meta, Struct

from dataflow.errors import DataError, RunError
from engine.channels.contract import BlockRequest, PeerLost
from engine.channels.frames import checksums, put_together_checked
from engine.channels.layout import SchemaLayout, select_layout

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, lt=2**62)]
Hash = int
Place = tuple[Count, Count, Count]
"""Of a buffer: (slab, offset, length) in shared memory, else (frame, 0, length). Length 0: none."""
NOWHERE: Place = (0, 0, 0)


class Wanted(Struct, array_like=True, frozen=True):
    """Columns (none: all) and rows (int64 as bytes; None: all) of a block."""

    block: Count
    columns: tuple[str, ...] = ()
    rows: bytes | None = None

    @staticmethod
    def of(request: BlockRequest) -> Wanted:
        """The message for a request."""
        packed_rows = None
        if request.rows is not None:
            packed_rows = np.ascontiguousarray(request.rows, dtype="<i8").tobytes()
        return Wanted(request.block, tuple(request.columns), packed_rows)

    def request(self, worker: str) -> BlockRequest:
        """The request to `worker`. Raises RunError for malformed rows."""
        rows = None
        if self.rows is not None:
            if len(self.rows) % 8:
                raise RunError(f"expected rows as numbers of 8 bytes, found {len(self.rows)} bytes")
            rows = np.frombuffer(self.rows, "<i8")
        return BlockRequest(worker=worker, block=self.block, columns=self.columns, rows=rows)


class FetchRequest(Struct, array_like=True, frozen=True, tag="fetch"):
    """Asks for blocks. content: with checksums, if the transport does not always send them."""

    id: Count
    wanted: tuple[Wanted, ...]
    content: bool = False


class TensorLayout(Struct, array_like=True, frozen=True):
    """The tensor of a `device` column. dtype: torch's name; hash: 0 if content is unchecked."""

    name: str
    dtype: str
    shape: list[Count]
    hash: Hash = 0


class BlockHeader(Struct, array_like=True, frozen=True, tag="block"):
    """A block, or some of its columns or rows. schema: that of these columns as an Arrow IPC
    message; in shared memory the hash of the whole block's schema, which was sent before. nodes:
    (length, nulls) of each array. sums: one for each buffer, or none at all.
    """

    block: Count
    rows: Count
    schema: bytes
    nodes: list[tuple[Count, Count]]
    places: list[Place]
    sums: list[Hash] = []
    tensors: list[TensorLayout] = []


class UnknownBlock(Struct, array_like=True, frozen=True, tag="unknown"):
    """A block that was released or never kept by this incarnation."""

    block: Count
    epoch: Count


class MissingColumn(Struct, array_like=True, frozen=True, tag="lacks"):
    """A block that lacks a column; error: the message."""

    block: Count
    error: str


Answer = BlockHeader | UnknownBlock | MissingColumn


class Reply(Struct, array_like=True, frozen=True, tag="reply"):
    """The answers to a FetchRequest, in its order. parts: number of FramesParts that follow."""

    id: Count
    answers: list[Answer]
    parts: Count = 0


encode = msgspec.msgpack.Encoder().encode
"""A message as msgpack."""


def decode_struct(decoder: msgspec.msgpack.Decoder[T], encoded: Any) -> T:
    """Invert `encode`. Raises RunError for any other bytes."""
    try:
        return decoder.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = f"expected a message of the data plane, found {len(encoded)} other bytes: {error}"
        raise RunError(problem) from error


header_of = partial(decode_struct, msgspec.msgpack.Decoder(BlockHeader))
"""A header that was encoded alone. Raises RunError for any other bytes."""


def narrow_header(
    header: BlockHeader, layout: SchemaLayout, columns: tuple[str, ...]
) -> tuple[BlockHeader, SchemaLayout]:
    """Header and layout of these columns (none: all) from those of a block. Raises DataError for a
    missing column, RunError for a header that does not fit its schema.
    """
    if not columns:
        return header, layout
    narrowed_layout, node_index, buffer_index = select_layout(layout, columns)
    nodes, places, sums = header.nodes, header.places, header.sums
    nodes_of_all, buffers_of_all = layout.node[-1], layout.buffer[-1]
    fits = len(nodes) == nodes_of_all and len(places) == buffers_of_all
    if not fits or (sums and len(sums) != buffers_of_all):
        raise RunError(f"a header of block {header.block} that does not fit its schema")
    nodes, places = [nodes[i] for i in node_index], [places[i] for i in buffer_index]
    if sums:
        sums = [sums[i] for i in buffer_index]
    return BlockHeader(
        header.block, header.rows, header.schema, nodes, places, sums
    ), narrowed_layout


def require_header(answer: Answer, request: BlockRequest) -> BlockHeader:
    """The answer, if it is a block. Raises KeyError, DataError, PeerLost, RunError."""
    if answer.block != request.block:
        raise RunError(f"expected block {request.block}, found {answer.block}")
    match answer:
        case BlockHeader():
            return answer
        case MissingColumn():
            raise DataError(answer.error)
        case UnknownBlock() if answer.epoch > request.block >> 32:
            problem = f"its process that kept block {request.block} is gone, and another answers"
            raise PeerLost(request.worker, problem)
        case UnknownBlock():
            raise KeyError(request.block)


def assemble_rows(
    header: BlockHeader,
    layout: SchemaLayout,
    find: Callable[[int, int, int], pa.Buffer],
    *,
    content: bool = False,
) -> pa.RecordBatch:
    """A header's rows. find: place -> its buffer. content: compare checksums. Raises RunError."""
    buffers = [find(*place) if place[2] else None for place in header.places]
    if content and checksums(buffers) != header.sums:
        raise RunError(f"block {header.block}: its content is not what its owner kept")
    try:
        return put_together_checked(layout, header.rows, header.nodes, buffers)
    except RunError as error:
        raise RunError(f"block {header.block}: {error}") from error
