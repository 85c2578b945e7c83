"""What two Workers of one host say about blocks: never rows, only where they lie.

Owns: the messages of a data socket. Does not own: headers and requests (header.py), framing
(fd_socket.py).

    reader -> owner     FetchRequest; SendTensors, which is answered elsewhere (tensors/pairs.py)
    owner -> reader     IndexHere (with the descriptor) at first; SlabHere (with the descriptor) and
                        SchemaHere before the first Reply that needs them; Reply; SlabsGone whenever
                        some were given back to the system
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from engine.channels.contract import BlockRequest
from engine.channels.header import Count, FetchRequest, Reply, Wanted, decoded


class IndexHere(Struct, array_like=True, frozen=True, tag="index"):
    """The owner's block index (block_index.py), whose descriptor comes beside this message."""

    size: Count


class SlabHere(Struct, array_like=True, frozen=True, tag="slab"):
    """A slab, whose descriptor comes beside this message."""

    number: Count
    size: Count
    on_disk: bool


class SlabsGone(Struct, array_like=True, frozen=True, tag="gone"):
    """Slabs that no block will lie in any more."""

    numbers: tuple[Count, ...]


class SchemaHere(Struct, array_like=True, frozen=True, tag="schema"):
    """A schema, as an Arrow IPC message, and its xxh3, by which headers name it."""

    hash: bytes
    data: bytes


class SendTensors(Struct, array_like=True, frozen=True, tag="send"):
    """Send tensors of these blocks, in this order, as the pair's transfer of this number: all that
    were kept with a block; or where columns are named, the values of their rows.
    """

    sequence: Count
    wanted: tuple[Wanted, ...]

    @staticmethod
    def of(sequence: int, requests: Sequence[BlockRequest]) -> SendTensors:
        """Requests as they travel."""
        return SendTensors(sequence, tuple(map(Wanted.of, requests)))

    def requests(self, worker: str) -> list[BlockRequest]:
        """The inverse, of the Worker that is asked. Raises RunError for rows that are none."""
        return [wanted.request(worker) for wanted in self.wanted]


FromOwner = IndexHere | SlabHere | SlabsGone | SchemaHere | Reply
FromReader = FetchRequest | SendTensors

_from_owner = msgspec.msgpack.Decoder(FromOwner)
_from_reader = msgspec.msgpack.Decoder(FromReader)


def decode_from_owner(data: bytes) -> FromOwner:
    """Raises RunError for what is no message of an owner."""
    return decoded(_from_owner, data)


def decode_from_reader(data: bytes) -> FromReader:
    """Raises RunError for what is no message of a reader."""
    return decoded(_from_reader, data)
