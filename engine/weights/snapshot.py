"""A version's weights as kept tensors, and a block that describes them, one row a piece.

Owns: the copies, room for them at the reader, their verification, which hash they have. Does not
own: how they travel (engine/channels), the description, hashes and digest (hashed_pieces.py).
Copies stay on the device of the weights; what is on a GPU is hashed there, so that only hashes go
to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import RunError
from dataflow.kernel import Piece
from engine.weights import hashed_pieces as blocks

if TYPE_CHECKING:
    from torch import Tensor


def copy_pieces(pieces: Iterable[Piece]) -> tuple[Batch, str, list[Tensor]]:
    """Copy the pieces. Returns a batch that describes them, their digest, and the copies. Raises
    RunError as `to_batch`.
    """
    import torch

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    rows: list[blocks.PieceRow] = []
    for number, piece in enumerate(pieces):
        # Copied one by one: a piece may be gone once the next one is asked for.
        rows.append(blocks.PieceRow.of(number, piece, copy(piece.data)))
    blocks.require_complete(rows)
    copies = [row.content for row in rows]
    kind = _choose_hash(copies)
    kinds = {"hash_kind": [kind] * len(rows)}
    hashes = _compute_hashes(rows, kind)
    batch, digest = blocks.describe_pieces(rows, hashes, blocks.DESCRIPTION, kinds)
    return batch, digest, copies


def make_room(records: pa.RecordBatch, device: str) -> list[Tensor]:
    """Make uninitialized tensors for what a block describes. Raises RunError for other records."""
    import torch

    if not records.schema.equals(blocks.DESCRIPTION):
        problem = f"expected the columns {blocks.DESCRIPTION.names}, found {records.schema.names}"
        raise RunError(f"weights: {problem}. Fix: writer and reader need the same plan.")
    rows = blocks.rows_of(records, [None] * records.num_rows)
    for row in rows:
        blocks.require_known(row)
    # All are checked before any room is made for one.
    tensors: list[Tensor] = []
    for row in rows:
        tensors.append(torch.empty(row.shape, dtype=getattr(torch, row.dtype), device=device))
    return tensors


def verify_pieces(records: pa.RecordBatch, arrived: Sequence[Tensor], digest: str) -> list[Piece]:
    """Verify that tensors are as described, and return their pieces. Raises RunError naming the one
    that is not.
    """
    if len(arrived) != records.num_rows:
        problem = f"expected {records.num_rows} pieces, found {len(arrived)} tensors"
        fix = "fetch the block that Offered names, all rows in order"
        raise RunError(f"weights: {problem}. Fix: {fix}.")
    kind = _read_hash_kind(records)
    rows = blocks.verified_rows(
        records, arrived, lambda described: _compute_hashes(described, kind), digest
    )
    for row in rows:
        dtype, shape = blocks.dtype_name(row.content), tuple(row.content.shape)
        if (dtype, shape) != (row.dtype, row.shape):
            problem = f"expected {row.dtype} {list(row.shape)}, found {dtype} {list(shape)}"
            fix = "receive into the tensors that `make_room` makes"
            raise RunError(f"weights: piece {row.name!r}: {problem}. Fix: {fix}.")
    return [Piece(row.name, row.content) for row in rows]


def _choose_hash(tensors: Sequence[Tensor]) -> blocks.HashKind:
    """That of the device if all are on a GPU."""
    if tensors and all(tensor.is_cuda for tensor in tensors):
        return "device"
    return "xxh3"


def _read_hash_kind(records: pa.RecordBatch) -> blocks.HashKind:
    """Raises RunError unless all pieces have one kind of hash that is known here."""
    kinds = records.column("hash_kind").unique().to_pylist()
    match kinds:
        case [] | ["xxh3"]:
            return "xxh3"
        case ["device"]:
            return "device"
        case _:
            problem = f"expected hashes of one kind, xxh3 or device, found {kinds}"
            fix = "writer and reader need the same version of this package"
            raise RunError(f"weights: {problem}. Fix: {fix}.")


def _compute_hashes(rows: Sequence[blocks.PieceRow], kind: blocks.HashKind) -> list[bytes]:
    """Of rows whose contents are tensors. A reader on a CPU computes the same as a GPU did."""
    contents = [blocks.bytes_of(row.content) for row in rows]
    if kind == "xxh3":
        on_host = (content.cpu().numpy() for content in contents)
        return [row.hash(content) for row, content in zip(rows, on_host, strict=True)]
    from engine.weights.device_hash import hash_tensors

    hashes = hash_tensors(contents)
    return [row.hash_on_device(hashed) for row, hashed in zip(rows, hashes, strict=True)]
