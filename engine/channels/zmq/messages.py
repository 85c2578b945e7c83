"""Blocks as multipart messages, for peers that share no memory: a header, and one frame a buffer.

Owns: requests and replies of engine/channels/zmq/channel.py, their checksums, and every check of what
came. Does not own: sockets, keys, which blocks there are.

    little     Header with all sums, frames
    much       Header, frames; Part 0, frames; Part 1, frames; ...; Sums

Each first frame begins with its own xxh3, and that of every other one is told. Nothing is decoded
before the checksum fits, nothing is put together before every frame has the length and the checksum
that were told. Of much, the frames are sent before they are summed up, and summed up as they come:
while others are on their way, and these in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import xxhash
from msgspec import Struct

from dataflow.errors import DataError, RunError
from engine.channels.contract import BlockRequest, PeerLost
from engine.channels.frames import checked_together, forms_from, taken_apart
from engine.channels.projection import named
from engine.channels.shm.messages import Count, Hash, Lacks, Unknown

LARGEST_REQUEST = 64 << 20
"""Bytes of a request, at most."""
_LARGE = 1 << 20
"""Bytes of frames after which a message is closed."""
_SUM = 8
_ALIGNED = 8


class Wanted(Struct, array_like=True, frozen=True):
    """Columns (none: all) and rows (int64 as bytes; None: all) of a block."""

    block: Count
    columns: tuple[str, ...] = ()
    rows: bytes | None = None

    @staticmethod
    def of(request: BlockRequest) -> Wanted:
        """A request as it travels."""
        rows = (
            None
            if request.rows is None
            else np.ascontiguousarray(request.rows, dtype="<i8").tobytes()
        )
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
    """Rows of a block: `lengths` of its buffers, of which those that are not 0 are the next frames."""

    block: Count
    rows: Count
    schema: bytes
    nodes: list[tuple[Count, Count]]
    lengths: list[Count]


class Header(Struct, array_like=True, frozen=True, tag="header"):
    """The answers to a Question, in its order. parts: how many messages with more frames follow,
    and then the sums; where none does, `sums` are those of all frames.
    """

    id: Count
    answers: list[Sent | Unknown | Lacks]
    sums: list[Hash]
    parts: Count


class Part(Struct, array_like=True, frozen=True, tag="part"):
    """More frames, of the message with this number behind the header."""

    id: Count
    number: Count


class Sums(Struct, array_like=True, frozen=True, tag="sums"):
    """What the frames of the header and of all parts have."""

    id: Count
    sums: list[Hash]


_encoder = msgspec.msgpack.Encoder()
_questions = msgspec.msgpack.Decoder(Question)
_replies = msgspec.msgpack.Decoder(Header | Part | Sums)


def question_bytes(number: int, requests: Sequence[BlockRequest]) -> bytes:
    """A request for blocks."""
    return _sealed(_encoder.encode(Question(number, tuple(Wanted.of(r) for r in requests))))


def question_of(data: Any) -> Question:
    """The inverse. Raises RunError for anything else."""
    return _opened(_questions, data)


def reply_bytes(message: Header | Part | Sums) -> bytes:
    """The first frame of a message to whoever asked."""
    return _sealed(_encoder.encode(message))


def reply_of(data: Any) -> Header | Part | Sums:
    """The inverse. Raises RunError for anything else."""
    return _opened(_replies, data)


def parts_of(frames: Sequence[pa.Buffer]) -> list[list[pa.Buffer]]:
    """The frames of each message, at least one message: each is closed by the frame with which it
    is large.
    """
    found: list[list[pa.Buffer]] = [[]]
    size = 0
    for frame in frames:
        if size >= _LARGE:
            found.append([])
            size = 0
        found[-1].append(frame)
        size += frame.size
    return found


def sent(block: int, records: pa.RecordBatch) -> tuple[Sent, list[pa.Buffer]]:
    """A record batch as part of a header, and its frames. Raises DataError for a type that does not
    travel.
    """
    framed = taken_apart(records)
    there = [b for b in framed.buffers if b is not None and b.size]
    answer = Sent(
        block=block,
        rows=framed.rows,
        schema=framed.forms.data,
        nodes=framed.nodes,
        lengths=[0 if b is None else b.size for b in framed.buffers],
    )
    return answer, there


@dataclass(kw_only=True)
class Answered:
    """What has come of a reply. sums: of its frames, as they came."""

    header: Header
    frames: list[Any] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    parts: int = 0
    whole: bool = False

    @staticmethod
    def of(message: Header | Part | Sums, frames: Sequence[Any]) -> Answered:
        """A reply that begins with this message. Raises RunError for one that none begins with."""
        if not isinstance(message, Header):
            raise RunError(f"expected the header of an answer, found {type(message).__name__}")
        found = Answered(header=message, told=message.sums, whole=not message.parts)
        found._take(frames)
        return found

    def add(self, message: Header | Part | Sums, frames: Sequence[Any]) -> None:
        """The next message. Raises RunError for another than that."""
        if isinstance(message, Part) and message.number == self.parts < self.header.parts:
            self.parts += 1
            self._take(frames)
        elif isinstance(message, Sums) and self.parts == self.header.parts and not frames:
            self.told, self.whole = message.sums, True
        else:
            raise RunError(
                f"expected part {self.parts} of {self.header.parts} and then the sums, found"
                f" {message}"
            )

    def _take(self, frames: Sequence[Any]) -> None:
        self.frames += frames
        self.sums += [xxhash.xxh3_64_intdigest(frame) for frame in frames]


def received(reply: Answered, requests: Sequence[BlockRequest]) -> list[pa.RecordBatch]:
    """The rows of each request. Raises KeyError, DataError, and RunError (naming no peer) for what
    cannot be right.
    """
    header, frames = reply.header, reply.frames
    if len(header.answers) != len(requests):
        raise RunError(f"expected {len(requests)} answers, found {len(header.answers)}")
    expected = sum(
        1 for a in header.answers if isinstance(a, Sent) for length in a.lengths if length
    )
    if expected != len(frames):
        raise RunError(f"expected {expected} frames, found {len(frames)}")
    if reply.sums != reply.told:
        raise RunError(
            f"blocks {[r.block for r in requests]}: their content was changed on its way"
        )
    buffers = iter(frames)
    return [
        _rows(answer, request, buffers)
        for answer, request in zip(header.answers, requests, strict=True)
    ]


def _rows(answer: Sent | Unknown | Lacks, request: BlockRequest, frames: Any) -> pa.RecordBatch:
    if answer.block != request.block:
        raise RunError(f"expected block {request.block}, found {answer.block}")
    match answer:
        case Unknown() if answer.epoch > request.block >> 32:
            raise PeerLost(
                request.worker,
                f"its process that kept block {request.block} is gone, and another answers",
            )
        case Unknown():
            raise KeyError(request.block)
        case Lacks():
            raise DataError(answer.error)
        case Sent():
            return _checked(
                answer, request, [_buffer(next(frames)) if n else None for n in answer.lengths]
            )


def _checked(
    answer: Sent, request: BlockRequest, buffers: list[pa.Buffer | None]
) -> pa.RecordBatch:
    for index, (buffer, length) in enumerate(zip(buffers, answer.lengths, strict=True)):
        if buffer is not None and buffer.size != length:
            raise RunError(
                f"buffer {index} of block {answer.block}: expected {length} bytes, found"
                f" {buffer.size}"
            )
    if request.rows is not None and len(request.rows) != answer.rows:
        raise RunError(
            f"block {answer.block}: expected {len(request.rows)} rows, found {answer.rows}"
        )
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
        raise RunError(
            f"expected a message of the data plane, found {len(view)} bytes whose checksum is wrong"
        )
    try:
        return decoder.decode(view[_SUM:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(
            f"expected a message of the data plane, found {len(view)} other bytes: {error}"
        ) from error
