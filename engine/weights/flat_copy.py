"""A version's weights in one memory that another process maps, and a block that says where.

Owns: the copy into such a memory, the description with each piece's place, reading the pieces out
of a mapped memory and verifying all at once. Does not own: the memory and how a process maps it
(engine/channels/tensors), hashes (device_hash.py), the other columns (hashed_pieces.py).

Pieces lie in their order, each from a multiple of device_hash.ROW on, and zeros fill up its last
row: the whole memory is hashed where it lies, in one go, and only the hashes go to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import RunError
from dataflow.kernel import Piece
from engine.weights import hashed_pieces as blocks

if TYPE_CHECKING:
    from torch import Tensor

_OFFSET = pa.field("offset", pa.int64(), nullable=False)
_MEMORY = pa.field("memory", pa.binary(), nullable=False)
PLACED = blocks.DESCRIPTION.append(_OFFSET).append(_MEMORY)
"""offset: of the piece in its memory, in bytes. memory: what a process maps that memory by."""


class Memories(Protocol):
    """Where memories that other processes can map come from, and go back to. One is its token, by
    which a process maps it, and its bytes: uint8, on the device of the weights.
    """

    def take(self, size: int) -> tuple[bytes, Tensor]:
        """One of at least so many bytes that nobody reads; without a token, of none."""
        ...

    def give_back(self, token: bytes) -> None:
        """Let it be taken again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatCopy:
    """A version as it was copied. token: of its memory. size: bytes that it takes of that."""

    batch: Batch
    digest: str
    token: bytes
    size: int


def copy_flat(pieces: Iterable[Piece], memories: Memories, expected_size: int = 0) -> FlatCopy:
    """Copy the pieces into one memory, and hash them there. The device is done with both when this
    returns. expected_size: bytes that they will take, if that is known; else they are copied twice.
    Raises RunError as `to_batch`.
    """
    from engine.weights.device_hash import begin_hash_flat, read_hashes, round_to_rows

    token, flat = memories.take(expected_size)
    rows: list[blocks.PieceRow] = []
    sizes: list[int] = []
    offset = 0
    for number, piece in enumerate(pieces):
        content = blocks.bytes_of(piece.data)
        end = offset + round_to_rows(len(content))
        # Copied one by one: a piece may be gone once the next one is asked for.
        if end <= len(flat):
            copied = _fill_rows(flat[offset:end], content)
        else:
            copied = content.clone()
        rows.append(blocks.PieceRow.of(number, piece, copied))
        sizes.append(len(content))
        offset = end
    blocks.require_complete(rows)
    offsets = place_pieces(sizes)
    size = offsets.pop()
    if size > len(flat):
        smaller = token
        token, flat = memories.take(size)
        for row, start, end in zip(rows, offsets, [*offsets[1:], size], strict=True):
            _fill_rows(flat[start:end], row.content)
        memories.give_back(smaller)
    # Reading the hashes waits for the device, which has copied everything by then.
    device_hashes = read_hashes(begin_hash_flat(flat[:size], sizes))
    hashes = [row.hash_on_device(hashed) for row, hashed in zip(rows, device_hashes, strict=True)]
    places = {
        "hash_kind": ["device"] * len(rows),
        "offset": offsets,
        "memory": [token] * len(rows),
    }
    batch, digest = blocks.describe_pieces(rows, hashes, PLACED, places)
    return FlatCopy(batch=batch, digest=digest, token=token, size=size)


def read_flat(
    records: pa.RecordBatch, map_memory: Callable[[bytes], Tensor], digest: str
) -> list[Piece]:
    """The pieces of a block, all verified: views of the memory that it names, for reading alone,
    until the block is released. map_memory: token -> its bytes. Raises RunError naming the piece
    that is not as described.
    """
    from engine.weights.device_hash import begin_hash_flat, read_hashes

    if not records.schema.equals(PLACED):
        problem = f"expected the columns {PLACED.names}, found {records.schema.names}"
        raise RunError(f"weights: {problem}. Fix: writer and reader need the same plan.")
    sizes = _described_sizes(records)
    offsets = place_pieces(sizes)
    size = offsets.pop()
    flat = _map_memory(records, map_memory, size)
    if records.column("offset").to_pylist() != offsets or size > len(flat):
        problem = f"expected pieces of {size} bytes one after another, found other places"
        where = f"in a memory of {len(flat)} bytes"
        fix = "writer and reader need the same version of this package"
        raise RunError(f"weights: {problem} {where}. Fix: {fix}.")
    lanes = begin_hash_flat(flat[:size], sizes)
    # The device hashes while views are made here, hundreds of them.
    contents = [flat[o : o + length] for o, length in zip(offsets, sizes, strict=True)]
    pieces = list(_view_pieces(blocks.rows_of(records, contents)))

    def compute_hashes(rows: Sequence[blocks.PieceRow]) -> list[bytes]:
        device_hashes = read_hashes(lanes)
        return [row.hash_on_device(h) for row, h in zip(rows, device_hashes, strict=True)]

    blocks.verified_rows(records, contents, compute_hashes, digest)
    return pieces


def place_pieces(sizes: Sequence[int]) -> list[int]:
    """Where pieces of so many bytes begin, and, as one more number, where the last one ends."""
    from engine.weights.device_hash import round_to_rows

    return list(accumulate(map(round_to_rows, sizes), initial=0))


def _fill_rows(room: Tensor, content: Tensor) -> Tensor:
    """Copy a piece into whole rows; returns it there."""
    size = len(content)
    room[size:].zero_()
    return room[:size].copy_(content)


def _described_sizes(records: pa.RecordBatch) -> list[int]:
    """Bytes of each piece. Raises RunError for a dtype or shape that no tensor has."""
    import torch

    sizes: list[int] = []
    for row in blocks.rows_of(records, [None] * records.num_rows):
        blocks.require_known(row)
        sizes.append(prod(row.shape) * getattr(torch, row.dtype).itemsize)
    return sizes


def _map_memory(
    records: pa.RecordBatch, map_memory: Callable[[bytes], Tensor], size: int
) -> Tensor:
    """The memory of all pieces; none is mapped for pieces without a byte."""
    import torch

    if not size:
        return torch.empty(0, dtype=torch.uint8)
    tokens = records.column("memory").unique().to_pylist()
    if len(tokens) != 1:
        problem = f"expected all pieces in one memory, found {len(tokens)} memories"
        fix = "writer and reader need the same version of this package"
        raise RunError(f"weights: {problem}. Fix: {fix}.")
    return map_memory(tokens[0])


def _view_pieces(rows: Iterable[blocks.PieceRow]) -> Iterator[Piece]:
    import torch

    for row in rows:
        kind = getattr(torch, row.dtype)
        yield Piece(row.name, row.content.view(kind).reshape(row.shape))
