"""Blocks as multipart messages, for peers that share no memory: a header, then one frame a buffer.

Owns: requests and replies of engine/channels/zmq.py, their checksums, and every check of what
came. Does not own: sockets, keys, which blocks there are.

The header begins with its own xxh3, and holds that of each buffer. Nothing is decoded before the checksum fits,
nothing is put together before every frame has the length and the checksum that the header says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import xxhash
from msgspec import Struct

from dataflow.errors import DataError, RunError
from engine.channels.contract import PeerLost, Request
from engine.channels.descriptors import Count, Hash, Lacks, Unknown
from engine.channels.frames import checked_together, checksums, forms_from, taken_apart
from engine.channels.picking import named

LARGEST_REQUEST = 64 << 20
"""Bytes of a request, at most."""
_SUM = 8
_ALIGNED = 8


class Wanted(Struct, array_like=True, frozen=True):
    """Columns (none: all) and rows (int64 as bytes; None: all) of a block."""

    block: Count
    columns: tuple[str, ...] = ()
    rows: bytes | None = None

    @staticmethod
    def of(request: Request) -> Wanted:
        """A request as it travels."""
        rows = None if request.rows is None else np.ascontiguousarray(request.rows, dtype="<i8").tobytes()
        return Wanted(request.block, tuple(request.columns), rows)

    def index(self) -> np.ndarray | None:
        """The rows wanted. Raises RunError where the bytes are no int64."""
        if self.rows is None:
            return None
        if len(self.rows) % 8:
            raise RunError(f"expected int64 row indices, found {len(self.rows)} bytes")
        return np.frombuffer(self.rows, "<i8")


class Question(Struct, array_like=True, frozen=True, tag="question"):
    """Please send these."""

    id: Count
    wanted: tuple[Wanted, ...]


class Sent(Struct, array_like=True, frozen=True, tag="sent"):
    """Rows of a block: `lengths` of its buffers, of which those that are not 0 are the next frames, and their sums."""

    block: Count
    rows: Count
    schema: bytes
    nodes: list[tuple[Count, Count]]
    lengths: list[Count]
    sums: list[Hash]


class Header(Struct, array_like=True, frozen=True, tag="header"):
    """The answers to a Question, in its order."""

    id: Count
    answers: list[Sent | Unknown | Lacks]


_encoder = msgspec.msgpack.Encoder()
_questions = msgspec.msgpack.Decoder(Question)
_headers = msgspec.msgpack.Decoder(Header)


def question_bytes(number: int, requests: Sequence[Request]) -> bytes:
    """A request for blocks."""
    return _sealed(_encoder.encode(Question(number, tuple(Wanted.of(r) for r in requests))))


def question_of(data: Any) -> Question:
    """The inverse. Raises RunError for anything else."""
    return _opened(_questions, data)


def header_bytes(number: int, answers: list[Sent | Unknown | Lacks]) -> bytes:
    """The first frame of a reply."""
    return _sealed(_encoder.encode(Header(number, answers)))


def header_of(data: Any) -> Header:
    """The inverse. Raises RunError for anything else."""
    return _opened(_headers, data)


def sent(block: int, records: pa.RecordBatch) -> tuple[Sent, list[pa.Buffer]]:
    """A record batch as part of a header, and its frames. Raises DataError for a type that does not travel."""
    framed = taken_apart(records)
    there = [b for b in framed.buffers if b is not None and b.size]
    answer = Sent(
        block=block,
        rows=framed.rows,
        schema=framed.forms.data,
        nodes=framed.nodes,
        lengths=[0 if b is None else b.size for b in framed.buffers],
        sums=checksums(framed.buffers),
    )
    return answer, there


def received(header: Header, frames: Sequence[Any], requests: Sequence[Request]) -> list[pa.RecordBatch]:
    """The rows of each request. Raises KeyError, DataError, and RunError (naming no peer) for what cannot be right."""
    if len(header.answers) != len(requests):
        raise RunError(f"expected {len(requests)} answers, found {len(header.answers)}")
    buffers = iter(frames)
    expected = sum(1 for a in header.answers if isinstance(a, Sent) for length in a.lengths if length)
    if expected != len(frames):
        raise RunError(f"expected {expected} frames, found {len(frames)}")
    return [_rows(answer, request, buffers) for answer, request in zip(header.answers, requests, strict=True)]


def _rows(answer: Sent | Unknown | Lacks, request: Request, frames: Any) -> pa.RecordBatch:
    if answer.block != request.block:
        raise RunError(f"expected block {request.block}, found {answer.block}")
    match answer:
        case Unknown() if answer.epoch > request.block >> 32:
            raise PeerLost(request.worker, f"its process that kept block {request.block} is gone, and another answers")
        case Unknown():
            raise KeyError(request.block)
        case Lacks():
            raise DataError(answer.error)
        case Sent():
            return _checked(answer, request, [_buffer(next(frames)) if n else None for n in answer.lengths])


def _checked(answer: Sent, request: Request, buffers: list[pa.Buffer | None]) -> pa.RecordBatch:
    for index, (buffer, length) in enumerate(zip(buffers, answer.lengths, strict=True)):
        if buffer is not None and buffer.size != length:
            raise RunError(f"buffer {index} of block {answer.block}: expected {length} bytes, found {buffer.size}")
    if checksums(buffers) != answer.sums:
        raise RunError(f"block {answer.block}: its content was changed on its way")
    if request.rows is not None and len(request.rows) != answer.rows:
        raise RunError(f"block {answer.block}: expected {len(request.rows)} rows, found {answer.rows}")
    forms = forms_from(answer.schema)
    names = forms.schema.names
    if request.columns and [names[i] for i in named(names, request.columns)] != names:
        raise RunError(f"block {answer.block}: expected columns {request.columns}, found {names}")
    return checked_together(forms, answer.rows, answer.nodes, buffers)


def _buffer(frame: Any) -> pa.Buffer:
    """A frame as an Arrow buffer; only a small one whose bytes are not aligned is copied."""
    buffer = pa.py_buffer(frame)
    return pa.py_buffer(buffer.to_pybytes()) if buffer.address % _ALIGNED else buffer


def _sealed(message: bytes) -> bytes:
    return xxhash.xxh3_64_digest(message) + message


def _opened(decoder: msgspec.msgpack.Decoder[Any], data: Any) -> Any:
    view = memoryview(data)
    if len(view) < _SUM or xxhash.xxh3_64_digest(view[_SUM:]) != bytes(view[:_SUM]):
        raise RunError(f"expected a message of the data plane, found {len(view)} bytes whose checksum is wrong")
    try:
        return decoder.decode(view[_SUM:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"expected a message of the data plane, found {len(view)} other bytes: {error}") from error
