"""A version's weights as kept tensors, and a block that describes them, one row a piece.

Owns: the copies, room for them at the reader, their verification. Does not own: how they travel
(engine/channels), the description, hashes and digest (hashed_pieces.py). Copies stay on the device
of the weights; hashes are computed on the host, so every byte goes there once at each end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
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
    hashes = [row.hash(_on_host(row.content)) for row in rows]
    batch, digest = blocks.describe_pieces(rows, hashes, blocks.DESCRIPTION)
    return batch, digest, copies


def make_room(records: pa.RecordBatch, device: str) -> list[Tensor]:
    """Make uninitialized tensors for what a block describes. Raises RunError for other records."""
    import torch

    if not records.schema.equals(blocks.DESCRIPTION):
        problem = f"expected the columns {blocks.DESCRIPTION.names}, found {records.schema.names}"
        raise RunError(f"weights: {problem}. Fix: writer and reader need the same plan.")
    names = records.column("name").to_pylist()
    dtypes = records.column("dtype").to_pylist()
    shapes = records.column("shape").to_pylist()
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if dtype not in blocks.DTYPES or min(shape, default=0) < 0:
            problem = f"piece {name!r} of {dtype} {shape} cannot be received"
            fix = "writer and reader need the same version of this package"
            raise RunError(f"weights: {problem}. Fix: {fix}.")
    # All are checked before any room is made for one.
    tensors: list[Tensor] = []
    for dtype, shape in zip(dtypes, shapes, strict=True):
        tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device=device))
    return tensors


def verify_pieces(records: pa.RecordBatch, arrived: Sequence[Tensor], digest: str) -> list[Piece]:
    """Verify that tensors are as described, and return their pieces. Raises RunError naming the one
    that is not.
    """
    if len(arrived) != records.num_rows:
        problem = f"expected {records.num_rows} pieces, found {len(arrived)} tensors"
        fix = "fetch the block that Offered names, all rows in order"
        raise RunError(f"weights: {problem}. Fix: {fix}.")
    rows = blocks.verified_rows(records, arrived, _on_host, digest)
    for row in rows:
        dtype, shape = blocks.dtype_name(row.content), tuple(row.content.shape)
        if (dtype, shape) != (row.dtype, row.shape):
            problem = f"expected {row.dtype} {list(row.shape)}, found {dtype} {list(shape)}"
            fix = "receive into the tensors that `make_room` makes"
            raise RunError(f"weights: piece {row.name!r}: {problem}. Fix: {fix}.")
    return [Piece(row.name, row.content) for row in rows]


def _on_host(tensor: Tensor) -> np.ndarray:
    return blocks.bytes_of(tensor).cpu().numpy()
