"""A version's weights as tensors that are kept, and a block that describes them: one row a piece,
without its data.

Owns: the copies, the description, its verification against what arrived. Does not own: how
either travels (engine/channels), hashes and digest (pieces.py: the same weights have the same).

The copies stay on the device where the weights are. Hashes are made on the host, so that every byte
crosses to it once at each end, a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.errors import RunError
from dataflow.kernel import Piece
from engine.weights.pieces import (
    DTYPES,
    SCHEMA,
    bytes_of,
    digest_of,
    dtype_of,
    hash_bytes,
    require_complete,
)

if TYPE_CHECKING:
    from torch import Tensor

DESCRIPTION = pa.schema([field for field in SCHEMA if field.name != "data"])


def snapshot(pieces: Iterable[Piece]) -> tuple[Batch, str, list[Tensor]]:
    """A description of the pieces as a batch, their digest, and copies of them; the pieces may be
    changed afterwards.

    Raises RunError for a name that comes twice and for a dtype that cannot travel.
    """
    import torch

    names, dtypes, copies = [], [], []
    for piece in pieces:
        names.append(piece.name)
        dtypes.append(dtype_of(piece))
        copies.append(piece.data.detach().clone(memory_format=torch.contiguous_format))
    require_complete(names, range(len(names)))
    hashes = [_hash(*row) for row in zip(range(len(names)), names, dtypes, copies, strict=True)]
    columns = [range(len(names)), names, dtypes, [list(copy.shape) for copy in copies], hashes]
    arrays = [
        pa.array(column, field.type) for column, field in zip(columns, DESCRIPTION, strict=True)
    ]
    batch = Batch(
        Keys.of(range(len(names))), pa.RecordBatch.from_arrays(arrays, schema=DESCRIPTION)
    )
    return batch, digest_of(hashes), copies


def room(records: pa.RecordBatch, device: str) -> list[Tensor]:
    """Tensors for what a block describes, whose contents are whatever was there. Raises RunError
    for other records.
    """
    import torch

    if not records.schema.equals(DESCRIPTION):
        raise RunError(
            f"weights: expected the columns {DESCRIPTION.names}, found {records.schema.names}. Fix:"
            " writer and reader need the same plan."
        )
    wanted = records.select(["name", "dtype", "shape"]).to_pylist()
    for row in wanted:
        if row["dtype"] not in DTYPES or min(row["shape"], default=0) < 0:
            raise RunError(
                f"weights: piece {row['name']!r} of {row['dtype']} {row['shape']} cannot be"
                " received. Fix: writer and reader need the same version of this package."
            )
    return [
        torch.empty(row["shape"], dtype=getattr(torch, row["dtype"]), device=device)
        for row in wanted
    ]


def verified(records: pa.RecordBatch, arrived: Sequence[Tensor], digest: str) -> list[Piece]:
    """The pieces, all of which are what the block describes. Raises RunError naming the one that is
    not.
    """
    numbers, names, dtypes, hashes = (
        records.column(n).to_pylist() for n in ("number", "name", "dtype", "hash")
    )
    require_complete(names, numbers)
    for number, name, dtype, tensor, hashed in zip(
        numbers, names, dtypes, arrived, hashes, strict=True
    ):
        if _hash(number, name, dtype, tensor) != hashed:
            raise RunError(
                f"weights: piece {name!r} ({dtype} {list(tensor.shape)}) does not have the content"
                " that its writer hashed. Fix: look for what changed it on its way; memory or a"
                " transport is at fault."
            )
    if digest_of(hashes) != digest:
        raise RunError(
            f"weights: {len(names)} pieces have digest {digest_of(hashes)}, expected {digest}: it"
            " is another version. Fix: fetch the block that Offered names."
        )
    return [Piece(name, tensor) for name, tensor in zip(names, arrived, strict=True)]


def _hash(number: int, name: str, dtype: str, tensor: Tensor) -> bytes:
    running = hash_bytes(number, name, dtype, tuple(tensor.shape))
    running.update(bytes_of(tensor).cpu().numpy().data)
    return running.digest()
