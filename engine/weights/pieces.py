"""A version's weights as a block: one row a piece, each with its hash.

Owns: the block's columns, hashes and digest, and their verification. Does not own: how the block
travels (engine/channels), what a module does with pieces (kernels).

A piece's hash is XXH3-128 of its number, name, dtype, shape and bytes; the digest, the version's
id, is that of all hashes in order. It finds damage and mistakes at memory speed (32 GB/s a core,
BLAKE2b 0.9) but is no signature: channels authenticate peers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from dataflow.batch import Batch, Keys
from dataflow.errors import RunError
from dataflow.kernel import Piece

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = pa.schema(
    [
        pa.field("number", pa.int64(), nullable=False),
        pa.field("name", pa.utf8(), nullable=False),
        pa.field("dtype", pa.utf8(), nullable=False),
        pa.field(
            "shape", pa.large_list(pa.field("item", pa.int64(), nullable=False)), nullable=False
        ),
        pa.field("hash", pa.binary(16), nullable=False),
        pa.field("data", pa.large_binary(), nullable=False),
    ]
)
"""number: the piece's place in order. dtype: torch's name. data: the elements as in memory."""
DESCRIPTION = SCHEMA.remove(SCHEMA.get_field_index("data"))
"""The schema of pieces whose data arrive separately (snapshot.py)."""

DTYPES = (
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip

Allocate = Callable[[int], Any]
"""Size in bytes -> a writable object of that size with the buffer protocol."""


@dataclass(frozen=True, slots=True, eq=False)
class PieceRow:
    """A piece as a row of a block. data: a tensor, or its elements as an array of bytes."""

    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any

    @staticmethod
    def of(number: int, piece: Piece, data: Tensor) -> PieceRow:
        """A piece's row with these data. Raises RunError for a dtype that cannot travel."""
        dtype = dtype_of(piece.data)
        if dtype not in DTYPES:
            raise RunError(
                f"weights: piece {piece.name!r}: expected a dtype of {', '.join(DTYPES)}, found"
                f" {dtype}. Fix: keep it out of the module's state, or convert it."
            )
        return PieceRow(number, piece.name, dtype, tuple(piece.data.shape), data)

    def hash(self, data: np.ndarray) -> bytes:
        """The piece's hash, with these bytes."""
        running = xxhash.xxh3_128(
            f"{self.number}\0{self.name}\0{self.dtype}\0{self.shape}\0".encode()
        )
        running.update(data.data)
        return running.digest()


def to_batch(pieces: Iterable[Piece], allocate: Allocate | None = None) -> tuple[Batch, str]:
    """A snapshot of the pieces as a batch of `SCHEMA`, and its digest.

    Every tensor is copied once, from any device, into one buffer: that of `allocate` (a channel's
    memory, so that keeping copies nothing), else of this process. Raises RunError for a repeated
    name and for a dtype that cannot travel.
    """
    rows = [PieceRow.of(n, piece, bytes_of(piece.data)) for n, piece in enumerate(pieces)]
    require_complete(rows)
    offsets = np.cumsum([0, *(len(row.data) for row in rows)], dtype=np.int64)
    size = int(offsets[-1])
    data = np.frombuffer((allocate or _own)(size) if size else b"", dtype=np.uint8)
    parts = [data[low:high] for low, high in pairwise(offsets.tolist())]
    hashes = [_copied(row, part) for row, part in zip(rows, parts, strict=True)]
    # Arrow wants a buffer, even an empty one.
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data if size else b"")]
    column = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(rows), buffers)
    return described(rows, hashes, SCHEMA, column)


def described(
    rows: Sequence[PieceRow], hashes: Sequence[bytes], schema: pa.Schema, *data: pa.Array
) -> tuple[Batch, str]:
    """A batch of these pieces, with or without their data, and its digest."""
    columns = [
        [row.number for row in rows],
        [row.name for row in rows],
        [row.dtype for row in rows],
        [list(row.shape) for row in rows],
        hashes,
    ]
    arrays = [pa.array(c, field.type) for c, field in zip(columns, DESCRIPTION, strict=True)]
    records = pa.RecordBatch.from_arrays([*arrays, *data], schema=schema)
    return Batch(Keys.of(range(len(rows))), records), digest_of(hashes)


def from_records(records: pa.RecordBatch, digest: str) -> Iterator[Piece]:
    """The pieces of a block: views of its memory, which they keep alive; do not write to them.

    All are verified before the first is returned. Raises RunError naming the piece that is changed,
    missing, repeated or out of order, and for records that are not weights.
    """
    if not records.schema.equals(SCHEMA):
        raise RunError(
            f"weights: expected the columns {SCHEMA.names}, found {records.schema.names} of types"
            f" {[str(t) for t in records.schema.types]}. Fix: fetch the block that Offered names,"
            " all columns of it."
        )
    rows = verified_rows(records, _parts(records.column("data")), lambda part: part, digest)
    return iter([Piece(row.name, _tensor(row)) for row in rows])


def verified_rows(
    records: pa.RecordBatch,
    data: Sequence[Any],
    read: Callable[[Any], np.ndarray],
    digest: str,
) -> list[PieceRow]:
    """The pieces that records describe, with their data; read: data -> bytes. Raises RunError
    naming the piece that is changed, missing, repeated or out of order.
    """
    columns = [records.column(field.name).to_pylist() for field in DESCRIPTION]
    rows, hashes = [], columns[-1]
    for number, name, dtype, shape, hashed, part in zip(*columns, data, strict=True):
        row = PieceRow(number, name, dtype, tuple(shape), part)
        if row.hash(read(part)) != hashed:
            raise RunError(
                f"weights: piece {name!r} ({dtype} {shape}) does not have the content that its"
                " writer hashed. Fix: look for what changed it on its way; memory or a transport"
                " is at fault."
            )
        rows.append(row)
    require_complete(rows)
    if digest_of(hashes) != digest:
        raise RunError(
            f"weights: {len(rows)} pieces, the last of them {rows[-1].name if rows else 'none'!r},"
            f" have digest {digest_of(hashes)}, expected {digest}: pieces after it are missing, or"
            " it is another version. Fix: fetch the block that Offered names, whole."
        )
    return rows


def dtypes_of(records: pa.RecordBatch) -> list[str]:
    """The dtypes of the pieces, each once."""
    return records.column("dtype").unique().to_pylist()


def digest_of(hashes: Iterable[bytes]) -> str:
    """The id of a version: the hash of its pieces' hashes in order, 32 hexadecimal digits."""
    return xxhash.xxh3_128(b"".join(hashes)).hexdigest()


def dtype_of(tensor: Tensor) -> str:
    """Torch's name of a tensor's dtype, `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements of a tensor as uint8 [bytes], a view if it is contiguous."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def require_complete(rows: Sequence[PieceRow]) -> None:
    """Raises RunError for a repeated name, or a number out of order."""
    seen: set[str] = set()
    for row in rows:
        if row.name in seen:
            raise RunError(
                f"weights: expected every piece once, found {row.name!r} twice. Fix: one row for"
                " each name."
            )
        seen.add(row.name)
    for place, row in enumerate(rows):
        if row.number != place:
            before = f"after {rows[place - 1].name!r}" if place else "at the beginning"
            raise RunError(
                f"weights: expected piece {place} {before}, found {row.name!r}, which is piece"
                f" {row.number}: one is missing or out of its order. Fix: fetch the block that"
                " Offered names, all rows in order."
            )


def _own(size: int) -> np.ndarray:
    return np.empty(size, dtype=np.uint8)


def _copied(row: PieceRow, part: np.ndarray) -> bytes:
    """Copy a tensor into the block; returns the piece's hash."""
    import torch

    if len(part):
        torch.from_numpy(part).copy_(torch.as_tensor(row.data))
    return row.hash(part)


def _parts(data: pa.Array) -> list[np.ndarray]:
    """uint8 views of the values of a large_binary column."""
    _, starts, values = data.buffers()
    if not len(data):
        return []
    offsets = np.frombuffer(starts, dtype=np.int64)[data.offset : data.offset + len(data) + 1]
    flat = np.frombuffer(b"" if values is None else values, dtype=np.uint8)
    return [flat[low:high] for low, high in pairwise(offsets.tolist())]


def _tensor(row: PieceRow) -> Tensor:
    """The tensor over a row's bytes."""
    import torch

    part, shape = row.data, row.shape
    kind = getattr(torch, row.dtype) if row.dtype in DTYPES else None
    if kind is None or min(shape, default=0) < 0 or len(part) != prod(shape) * kind.itemsize:
        raise RunError(
            f"weights: piece {row.name!r}: {len(part)} bytes are no {row.dtype} of shape"
            f" {list(shape)}. Fix: writer and reader need the same version of this package."
        )
    if not len(part):
        return torch.empty(shape, dtype=kind)
    if part.ctypes.data % kind.itemsize:
        # After an odd number of narrow elements a view would not be aligned.
        part = part.copy()
    # torch has no read-only tensors and warns of such memory; it takes a ctypes array, and keeps
    # that and its owner alive.
    raw = (ctypes.c_uint8 * len(part)).from_address(part.ctypes.data)
    raw.owner = part  # type: ignore[attr-defined]
    return torch.frombuffer(raw, dtype=kind).reshape(shape)
