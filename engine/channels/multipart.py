"""Blocks as a reply and one frame for each buffer, for readers that share no memory.

Owns: the messages of a reply, their checksums, every check of what arrives. Does not own: headers
(block_requests.py), how messages travel (zmq/, tensors/row_broadcast.py).

    small reply   Reply with the sums in its headers, frames
    large reply   Reply, frames; FramesPart 0, frames; FramesPart 1, frames; ...; FrameSums

A message begins with its own xxh3. It is decoded only if that fits; rows are put together only
if every frame has its length and checksum. The frames of a large reply are hashed after they are
sent and as they arrive: meanwhile others are on their way, and these are in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec
import pyarrow as pa
import xxhash
from msgspec import Struct

from dataflow.errors import RunError
from engine.channels import block_requests as h
from engine.channels.contract import BlockRequest, Requests
from engine.channels.frames import checksums, take_apart
from engine.channels.layout import layout_from
from engine.channels.projection import column_indices

LARGEST_REQUEST = 64 << 20
"""Bytes of a request, at most."""
_LARGE = 1 << 20
"""Bytes of frames after which the next message begins."""
_SUM = 8
_ALIGNED = 8


class FramesPart(Struct, array_like=True, frozen=True, tag="part"):
    """More frames. number: of the parts of this reply, from 0."""

    id: h.Count
    number: h.Count


class FrameSums(Struct, array_like=True, frozen=True, tag="sums"):
    """The checksums of the frames of the reply and of all parts."""

    id: h.Count
    sums: list[h.Hash]


Message = h.Reply | FramesPart | FrameSums

_requests = msgspec.msgpack.Decoder(h.FetchRequest)
_messages = msgspec.msgpack.Decoder(Message)


def seal_message(message: Struct | bytes) -> bytes:
    """A message as a first frame, with its checksum."""
    encoded = message
    if not isinstance(encoded, bytes):
        encoded = h.encode(encoded)
    return xxhash.xxh3_64_digest(encoded) + encoded


def request_of(frame: Any) -> h.FetchRequest:
    """The request in a first frame. Raises RunError for other bytes."""
    return h.decode_struct(_requests, _verify_frame(frame))


def message_of(frame: Any) -> Message:
    """The message in a first frame. Raises RunError for other bytes."""
    return h.decode_struct(_messages, _verify_frame(frame))


def _verify_frame(frame: Any) -> memoryview:
    view = memoryview(frame)
    if len(view) < _SUM or xxhash.xxh3_64_digest(view[_SUM:]) != bytes(view[:_SUM]):
        problem = f"found {len(view)} bytes whose checksum is wrong"
        raise RunError(f"expected a message of the data plane, {problem}")
    return view[_SUM:]


def frame_block(block: int, records: pa.RecordBatch) -> tuple[h.BlockHeader, list[pa.Buffer]]:
    """A record batch's header, without checksums, and its frames. Raises DataError."""
    parts = take_apart(records)
    places: list[tuple[int, int, int]] = []
    frames: list[pa.Buffer] = []
    for buffer in parts.buffers:
        if buffer is None or not buffer.size:
            places.append(h.NOWHERE)
        else:
            places.append((len(frames), 0, buffer.size))
            frames.append(buffer)
    return h.BlockHeader(block, parts.rows, parts.layout.encoded, parts.nodes, places), frames


def add_checksums(answers: Sequence[h.Answer], frames: Sequence[pa.Buffer]) -> list[h.Answer]:
    """Answers with the checksums of their frames."""
    sums_left = iter(checksums(frames))
    summed: list[h.Answer] = []
    for answer in answers:
        if isinstance(answer, h.BlockHeader):
            sums = [next(sums_left) if length else 0 for _, _, length in answer.places]
            answer = msgspec.structs.replace(answer, sums=sums)
        summed.append(answer)
    return summed


def split_frames(frames: Sequence[pa.Buffer]) -> list[list[pa.Buffer]]:
    """The frames of each message; the last frame of one takes it over the limit."""
    parts: list[list[pa.Buffer]] = [[]]
    size = 0
    for frame in frames:
        if size >= _LARGE:
            parts.append([])
            size = 0
        parts[-1].append(frame)
        size += frame.size
    return parts


def _headers(reply: h.Reply) -> list[h.BlockHeader]:
    return [answer for answer in reply.answers if isinstance(answer, h.BlockHeader)]


def lengths_of(reply: h.Reply) -> list[int]:
    """Bytes of each frame of a reply."""
    places = chain.from_iterable(header.places for header in _headers(reply))
    return [length for _, _, length in places if length]


def _sums_of(reply: h.Reply) -> list[int]:
    """The checksums in a reply's headers, one for each frame."""
    sums: list[int] = []
    for header in _headers(reply):
        # A large reply's headers have none: they come last, with FrameSums.
        for hashed, (_, _, length) in zip(header.sums, header.places, strict=False):
            if length:
                sums.append(hashed)
    return sums


@dataclass(kw_only=True)
class IncomingReply:
    """What has arrived of a reply. sums: of its frames as received; sums_sent: as sent."""

    reply: h.Reply
    frames: list[Any] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    sums_sent: list[int] = field(default_factory=list)
    parts: int = 0
    whole: bool = False

    @staticmethod
    def of(message: Message, frames: Sequence[Any]) -> IncomingReply:
        """A reply that begins with this message. Raises RunError for any but a Reply."""
        if not isinstance(message, h.Reply):
            raise RunError(f"expected the header of an answer, found {type(message).__name__}")
        incoming = IncomingReply(
            reply=message, sums_sent=_sums_of(message), whole=not message.parts
        )
        incoming._take(frames)
        return incoming

    def add(self, message: Message, frames: Sequence[Any]) -> None:
        """Add the next message. Raises RunError for any other."""
        if isinstance(message, FramesPart) and message.number == self.parts < self.reply.parts:
            self.parts += 1
            self._take(frames)
        elif isinstance(message, FrameSums) and self.parts == self.reply.parts and not frames:
            self.sums_sent, self.whole = message.sums, True
        else:
            expected = f"part {self.parts} of {self.reply.parts} and then the sums"
            raise RunError(f"expected {expected}, found {message}")

    def rows(self, requests: Requests) -> list[pa.RecordBatch]:
        """The rows of each request. Raises KeyError, DataError, RunError (naming no peer)."""
        if len(self.reply.answers) != len(requests):
            raise RunError(f"expected {len(requests)} answers, found {len(self.reply.answers)}")
        expected = len(lengths_of(self.reply))
        if expected != len(self.frames):
            raise RunError(f"expected {expected} frames, found {len(self.frames)}")
        if self.sums != self.sums_sent:
            blocks = [request.block for request in requests]
            raise RunError(f"blocks {blocks}: their content was changed on its way")
        frames = iter(self.frames)
        return [
            _rows(h.require_header(answer, request), request, frames)
            for answer, request in zip(self.reply.answers, requests, strict=True)
        ]

    def _take(self, frames: Sequence[Any]) -> None:
        self.frames += frames
        self.sums += [xxhash.xxh3_64_intdigest(frame) for frame in frames]


def _rows(header: h.BlockHeader, request: BlockRequest, frames: Iterator[Any]) -> pa.RecordBatch:
    mine: list[pa.Buffer] = []
    block = f"block {header.block}"
    for index, (number, offset, length) in enumerate(header.places):
        if length:
            mine.append(_buffer(next(frames)))
            size = mine[-1].size
            if (number, offset, length) != (len(mine) - 1, 0, size):
                raise RunError(f"buffer {index} of {block}: expected {length} bytes, found {size}")
    if request.rows is not None and len(request.rows) != header.rows:
        raise RunError(f"{block}: expected {len(request.rows)} rows, found {header.rows}")
    layout = layout_from(header.schema)
    names = layout.schema.names
    if request.columns and [names[i] for i in column_indices(names, request.columns)] != names:
        raise RunError(f"{block}: expected columns {request.columns}, found {names}")
    return h.assemble_rows(header, layout, lambda number, offset, length: mine[number])


def _buffer(frame: Any) -> pa.Buffer:
    """A frame as an Arrow buffer, copied only where it is not aligned (small frames)."""
    buffer = pa.py_buffer(frame)
    if buffer.address % _ALIGNED:
        return pa.py_buffer(buffer.to_pybytes())
    return buffer
