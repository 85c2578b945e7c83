"""The messages between two Workers of one host: where blocks lie, never rows.

    reader -> owner     FetchRequest; SendTensors, which tensors/pairs.py answers
    owner -> reader     first IndexHere; SlabHere and SchemaHere before the first Reply that needs
                        them; Reply; SlabsGone

Does not own: headers and requests (engine/channels/block_requests.py), framing (fd_socket.py).
"""

from __future__ import annotations

from functools import partial

from msgspec import Struct
from msgspec.msgpack import Decoder

from engine.channels.block_requests import Count, FetchRequest, Reply, Wanted, decode_struct
from engine.channels.contract import BlockRequest, Requests


class IndexHere(Struct, array_like=True, frozen=True, tag="index"):
    """The owner's block index; its descriptor comes with this message."""

    size: Count


class SlabHere(Struct, array_like=True, frozen=True, tag="slab"):
    """A slab; its descriptor comes with this message."""

    number: Count
    size: Count
    on_disk: bool


class SlabsGone(Struct, array_like=True, frozen=True, tag="gone"):
    """Slabs that were returned to the system."""

    numbers: tuple[Count, ...]


class SchemaHere(Struct, array_like=True, frozen=True, tag="schema"):
    """A schema as an Arrow IPC message, and its xxh3, by which headers name it."""

    hash: bytes
    data: bytes


class SendTensors(Struct, array_like=True, frozen=True, tag="send"):
    """Send tensors of these blocks, or of the columns named, as the pair's transfer `sequence`."""

    sequence: Count
    wanted: tuple[Wanted, ...]

    @staticmethod
    def of(sequence: int, requests: Requests) -> SendTensors:
        """The message for these requests."""
        return SendTensors(sequence, tuple(map(Wanted.of, requests)))

    def requests(self, worker: str) -> list[BlockRequest]:
        """The requests to `worker`. Raises RunError for malformed rows."""
        return [wanted.request(worker) for wanted in self.wanted]


FromOwner = IndexHere | SlabHere | SlabsGone | SchemaHere | Reply
FromReader = FetchRequest | SendTensors

decode_from_owner = partial(decode_struct, Decoder(FromOwner))
"""A message of an owner. Raises RunError for other bytes."""
decode_from_reader = partial(decode_struct, Decoder(FromReader))
"""A message of a reader. Raises RunError for other bytes."""
