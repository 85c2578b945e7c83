"""What two Workers of one host say about blocks: never rows, only where they lie.

Owns: the messages of engine/channels/shm/channel.py and their bounds. Does not own: framing (packets.py).

    reader -> owner     Fetch; Send, which is answered elsewhere (pairs.py): with tensors, never here
    owner -> reader     BoardHere (with the descriptor) at first; SlabHere (with the descriptor), ShapeHere, before the
                        first Reply that needs them; Reply; SlabGone whenever one was given back to the system
    on the board        BlockLocation, of all columns of a block
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from dataflow.errors import RunError
from engine.channels.contract import BlockRequest

Count = Annotated[int, Meta(ge=0, lt=2**62)]
Hash = int
"""Only compared."""


class Ask(Struct, array_like=True, frozen=True):
    """Columns of a block; none named means all. content: with checksums."""

    block: Count
    columns: tuple[str, ...] = ()
    content: bool = False


class Fetch(Struct, array_like=True, frozen=True, tag="fetch"):
    """Where do these lie?"""

    id: Count
    asks: tuple[Ask, ...]


class BoardHere(Struct, array_like=True, frozen=True, tag="board"):
    """The owner's board (board.py), whose descriptor comes beside this message."""

    size: Count


class Part(Struct, array_like=True, frozen=True):
    """Tensors of a block: all that were kept with it; or of these device columns, of these rows
    (int64 after int64 as bytes, None for all) the values.
    """

    block: Count
    columns: tuple[str, ...] = ()
    rows: bytes | None = None


class Send(Struct, array_like=True, frozen=True, tag="send"):
    """Send these tensors, in this order, as the pair's transfer of this number."""

    sequence: Count
    parts: tuple[Part, ...]


class SlabHere(Struct, array_like=True, frozen=True, tag="slab"):
    """A slab, whose descriptor comes beside this message."""

    number: Count
    size: Count
    on_disk: bool


class SlabGone(Struct, array_like=True, frozen=True, tag="gone"):
    """Slabs that no block will lie in any more."""

    numbers: tuple[Count, ...]


class ShapeHere(Struct, array_like=True, frozen=True, tag="shape"):
    """A schema, as an Arrow IPC message, by its xxh3."""

    hash: Hash
    data: bytes


class BlockLocation(Struct, array_like=True, frozen=True, tag="lies"):
    """A block: the hash of its whole schema; of the columns asked for nodes, places and checksums
    (or none).
    """

    block: Count
    rows: Count
    shape: Hash
    nodes: list[tuple[Count, Count]]
    places: list[tuple[Count, Count, Count]]
    """(slab, offset, length); a buffer of length 0 is not there."""
    sums: list[Hash] = []


class Unknown(Struct, array_like=True, frozen=True, tag="unknown"):
    """A block that was released or never kept by this incarnation."""

    block: Count
    epoch: Count


class Lacks(Struct, array_like=True, frozen=True, tag="lacks"):
    """A block that has no such column; told in words."""

    block: Count
    error: str


class Reply(Struct, array_like=True, frozen=True, tag="reply"):
    """The answers to a Fetch, in its order."""

    id: Count
    answers: list[BlockLocation | Unknown | Lacks]


FromOwner = BoardHere | SlabHere | SlabGone | ShapeHere | Reply

_encoder = msgspec.msgpack.Encoder()
_from_owner = msgspec.msgpack.Decoder(FromOwner)
_from_reader = msgspec.msgpack.Decoder(Fetch | Send)
_lies = msgspec.msgpack.Decoder(BlockLocation)
_T = TypeVar("_T")


def encode(message: Struct) -> bytes:
    """A message as msgpack."""
    return _encoder.encode(message)


def send_of(sequence: int, requests: Sequence[BlockRequest]) -> Send:
    """What is said of requests for tensors."""
    rows = [
        None if r.rows is None else np.ascontiguousarray(r.rows, "<i8").tobytes() for r in requests
    ]
    return Send(
        sequence,
        tuple(
            Part(r.block, tuple(r.columns), data) for r, data in zip(requests, rows, strict=True)
        ),
    )


def requests_of(send: Send, worker: str) -> list[BlockRequest]:
    """The inverse, of the Worker that is asked. Raises RunError for rows that are none."""
    if any(part.rows is not None and len(part.rows) % 8 for part in send.parts):
        raise RunError("expected rows as numbers of 8 bytes, found a part of one")
    return [
        BlockRequest(
            worker=worker,
            block=part.block,
            columns=part.columns,
            rows=None if part.rows is None else np.frombuffer(part.rows, "<i8"),
        )
        for part in send.parts
    ]


def decode_from_reader(data: bytes) -> Fetch | Send:
    """Raises RunError for what is no message of a reader."""
    return _decoded(_from_reader, data)


def decode_from_owner(data: bytes) -> FromOwner:
    """Raises RunError for what is no message of an owner."""
    return _decoded(_from_owner, data)


def decode_lies(data: bytes) -> BlockLocation:
    """Raises RunError for what is no note of a board."""
    return _decoded(_lies, data)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(
            f"expected a message of the data plane, found {len(data)} other bytes: {error}"
        ) from error
