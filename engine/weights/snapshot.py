"""A version's weights as kept tensors, and a block that describes them, one row a piece.

Owns: the copies, room for them at the reader, their verification. Does not own: how they travel
(engine/channels), the description, hashes and digest (pieces.py; equal for equal weights).

Copies stay on the device of the weights. Hashes are computed on the host, a piece at a time, so
every byte goes there once at each end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import RunError
from dataflow.kernel import Piece
from engine.weights import pieces as blocks

if TYPE_CHECKING:
    from torch import Tensor


def snapshot(pieces: Iterable[Piece]) -> tuple[Batch, str, list[Tensor]]:
    """A description of the pieces as a batch, their digest, and copies of them. Raises RunError
    for a repeated name and for a dtype that cannot travel.
    """
    import torch

    rows = [
        blocks.PieceRow.of(
            number, piece, piece.data.detach().clone(memory_format=torch.contiguous_format)
        )
        for number, piece in enumerate(pieces)
    ]
    blocks.require_complete(rows)
    hashes = [row.hash(_on_host(row.data)) for row in rows]
    batch, digest = blocks.described(rows, hashes, blocks.DESCRIPTION)
    return batch, digest, [row.data for row in rows]


def room(records: pa.RecordBatch, device: str) -> list[Tensor]:
    """Uninitialized tensors for what a block describes. Raises RunError for other records."""
    import torch

    if not records.schema.equals(blocks.DESCRIPTION):
        raise RunError(
            f"weights: expected the columns {blocks.DESCRIPTION.names}, found"
            f" {records.schema.names}. Fix: writer and reader need the same plan."
        )
    wanted = records.select(["name", "dtype", "shape"]).to_pylist()
    for row in wanted:
        if row["dtype"] not in blocks.DTYPES or min(row["shape"], default=0) < 0:
            raise RunError(
                f"weights: piece {row['name']!r} of {row['dtype']} {row['shape']} cannot be"
                " received. Fix: writer and reader need the same version of this package."
            )
    return [
        torch.empty(row["shape"], dtype=getattr(torch, row["dtype"]), device=device)
        for row in wanted
    ]


def verified(records: pa.RecordBatch, arrived: Sequence[Tensor], digest: str) -> list[Piece]:
    """The pieces, all as described. Raises RunError naming the one that is not."""
    if len(arrived) != records.num_rows:
        raise RunError(
            f"weights: expected {records.num_rows} pieces, found {len(arrived)} tensors. Fix: fetch"
            " the block that Offered names, all rows in order."
        )
    rows = blocks.verified_rows(records, arrived, _on_host, digest)
    for row in rows:
        dtype, shape = blocks.dtype_of(row.data), tuple(row.data.shape)
        if (dtype, shape) != (row.dtype, row.shape):
            raise RunError(
                f"weights: piece {row.name!r}: expected {row.dtype} {list(row.shape)}, found"
                f" {dtype} {list(shape)}. Fix: receive into the tensors that `room` makes."
            )
    return [Piece(row.name, row.data) for row in rows]


def _on_host(tensor: Tensor) -> np.ndarray:
    return blocks.bytes_of(tensor).cpu().numpy()
