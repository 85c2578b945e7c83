"""A version's weights as a block: one row a piece, each with its hash.

Owns: the block's columns, hashes and digest, and their verification. Does not own: how the block
travels (engine/channels), what a module does with pieces (kernels).

A piece's hash is XXH3-128 of its number, name, dtype, shape and bytes (where bytes lie on a GPU, of
what device_hash.py makes of them there); the digest, the version's id, is that of all hashes in
order. It detects damage at memory speed (32 GB/s a core, BLAKE2b 0.9) but is no signature: channels
authenticate peers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import xxhash

from dataflow.batch import Batch, Keys
from dataflow.errors import RunError
from dataflow.kernel import Piece

if TYPE_CHECKING:
    from torch import Tensor

_SHAPE = pa.large_list(pa.field("item", pa.int64(), nullable=False))
_COLUMNS = (
    ("number", pa.int64()), ("name", pa.utf8()), ("dtype", pa.utf8()),
    ("shape", _SHAPE), ("hash", pa.binary(16)), ("data", pa.large_binary()),
)  # fmt: skip
SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _COLUMNS])
"""number: the piece's place in order. dtype: torch's name. data: the elements as in memory."""
DESCRIPTION = SCHEMA.remove(SCHEMA.get_field_index("data")).append(
    pa.field("hash_kind", pa.utf8(), nullable=False)
)
"""The schema of pieces whose data arrive separately (snapshot.py), and which hash each has."""

HashKind = Literal["xxh3", "device"]
"""What a hash has of a piece's bytes: themselves, or what device_hash.py makes of them."""

DTYPES = (
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip

Allocate = Callable[[int], Any]
"""Size in bytes -> a writable object of that size with the buffer protocol."""


@dataclass(frozen=True, slots=True, eq=False)
class PieceRow:
    """A piece as a row of a block. content: a tensor, or its elements as an array of bytes."""

    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    content: Any

    @staticmethod
    def of(number: int, piece: Piece, content: Tensor) -> PieceRow:
        """A piece's row with these data. Raises RunError for a dtype that cannot travel."""
        dtype = dtype_name(piece.data)
        if dtype not in DTYPES:
            problem = f"expected a dtype of {', '.join(DTYPES)}, found {dtype}"
            fix = "keep it out of the module's state, or convert it"
            raise RunError(f"weights: piece {piece.name!r}: {problem}. Fix: {fix}.")
        return PieceRow(number, piece.name, dtype, tuple(piece.data.shape), content)

    def hash(self, content: np.ndarray) -> bytes:
        """The piece's hash, with these bytes."""
        return self._hash_after_head("", content.data)

    def hash_on_device(self, device_hash: bytes) -> bytes:
        """The piece's hash, with bytes that have this hash by device_hash.py."""
        return self._hash_after_head("device\0", device_hash)

    def _hash_after_head(self, kind: str, content: bytes | memoryview) -> bytes:
        head = f"{self.number}\0{self.name}\0{self.dtype}\0{self.shape}\0{kind}"
        running = xxhash.xxh3_128(head.encode())
        running.update(content)
        return running.digest()


def to_batch(pieces: Iterable[Piece], allocate: Allocate | None = None) -> tuple[Batch, str]:
    """A snapshot of the pieces as a batch of `SCHEMA`, and its digest. Every tensor is copied once,
    from any device, into one buffer: that of `allocate` (a channel's memory, so that keeping copies
    nothing), else of this process. Raises RunError for a repeated name or another dtype.
    """
    rows = _view_rows(pieces)
    require_complete(rows)
    lengths = [len(row.content) for row in rows]
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    size = int(offsets[-1])
    allocate = allocate or partial(np.empty, dtype=np.uint8)
    memory = b""  # Arrow wants a buffer, even an empty one
    if size:
        memory = allocate(size)
    content = np.frombuffer(memory, dtype=np.uint8)
    hashes: list[bytes] = []
    for row, (low, high) in zip(rows, pairwise(offsets.tolist()), strict=True):
        hashes.append(_copy_tensor(row, content[low:high]))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(memory)]
    column = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(rows), buffers)
    return describe_pieces(rows, hashes, SCHEMA, {"data": column})


def _view_rows(pieces: Iterable[Piece]) -> list[PieceRow]:
    rows: list[PieceRow] = []
    for number, piece in enumerate(pieces):
        rows.append(PieceRow.of(number, piece, bytes_of(piece.data)))
    return rows


def describe_pieces(
    rows: Sequence[PieceRow],
    hashes: Sequence[bytes],
    schema: pa.Schema,
    further: Mapping[str, Sequence[Any] | pa.Array],
) -> tuple[Batch, str]:
    """A batch of these pieces with a schema that has the columns of `SCHEMA` but for the data, and
    further ones; and its digest.
    """
    columns: dict[str, Sequence[Any] | pa.Array] = {
        "number": [row.number for row in rows],
        "name": [row.name for row in rows],
        "dtype": [row.dtype for row in rows],
        "shape": [list(row.shape) for row in rows],
        "hash": hashes,
    }
    columns |= further
    arrays: list[pa.Array] = []
    for field in schema:
        column = columns[field.name]
        if not isinstance(column, pa.Array):
            column = pa.array(column, field.type)
        arrays.append(column)
    records = pa.RecordBatch.from_arrays(arrays, schema=schema)
    keys = Keys.of(range(len(rows)))
    return Batch(keys, records), version_digest(hashes)


def from_records(records: pa.RecordBatch, digest: str) -> Iterator[Piece]:
    """A block's pieces, all verified: views of its memory, which they keep alive; not for writing.
    Raises RunError naming a piece that is changed, missing, repeated or out of order.
    """
    if not records.schema.equals(SCHEMA):
        types = [str(kind) for kind in records.schema.types]
        columns = f"{records.schema.names} of types {types}"
        problem = f"expected the columns {SCHEMA.names}, found {columns}"
        fix = "fetch all columns of the block that Offered names"
        raise RunError(f"weights: {problem}. Fix: {fix}.")
    parts = _parts(records.column("data"))
    rows = verified_rows(records, parts, hash_on_host, digest)
    tensors = map(_tensor, rows)
    return iter([Piece(row.name, tensor) for row, tensor in zip(rows, tensors, strict=True)])


def verified_rows(
    records: pa.RecordBatch,
    contents: Sequence[Any],
    compute_hashes: Callable[[Sequence[PieceRow]], list[bytes]],
    digest: str,
) -> list[PieceRow]:
    """The pieces of records and data. compute_hashes: of rows with this content. Raises RunError as
    `from_records`.
    """
    rows = rows_of(records, contents)
    described_hashes = records.column("hash").to_pylist()
    for row, computed, described in zip(rows, compute_hashes(rows), described_hashes, strict=True):
        if computed != described:
            problem = "does not have the content that its writer hashed"
            fix = "look for damaged memory or a faulty transport"
            shown = f"piece {row.name!r} ({row.dtype} {list(row.shape)})"
            raise RunError(f"weights: {shown} {problem}. Fix: {fix}.")
    require_complete(rows)
    # The hashes of the pieces do not say that the last ones are there; their digest does.
    arrived_digest = version_digest(described_hashes)
    if arrived_digest != digest:
        last = rows[-1].name if rows else "none"
        arrived = f"{len(rows)} pieces up to {last!r} have digest {arrived_digest}"
        why = "pieces are missing after it, or it is another version"
        fix = "fetch the whole block that Offered names"
        raise RunError(f"weights: {arrived}, expected {digest}: {why}. Fix: {fix}.")
    return rows


def rows_of(records: pa.RecordBatch, contents: Sequence[Any]) -> list[PieceRow]:
    """The rows of a block, with these contents; nothing is verified."""
    names = ("number", "name", "dtype", "shape")
    columns = [records.column(name).to_pylist() for name in names]
    rows: list[PieceRow] = []
    for number, name, dtype, shape, content in zip(*columns, contents, strict=True):
        rows.append(PieceRow(number, name, dtype, tuple(shape), content))
    return rows


def hash_on_host(rows: Sequence[PieceRow]) -> list[bytes]:
    """The XXH3 hashes of rows whose contents are arrays of bytes."""
    return [row.hash(row.content) for row in rows]


def require_known(row: PieceRow) -> None:
    """Raises RunError for a dtype or shape that no tensor has."""
    if row.dtype not in DTYPES or min(row.shape, default=0) < 0:
        problem = f"piece {row.name!r} of {row.dtype} {list(row.shape)} cannot be received"
        fix = "writer and reader need the same version of this package"
        raise RunError(f"weights: {problem}. Fix: {fix}.")


def dtypes_of(records: pa.RecordBatch) -> list[str]:
    """The dtypes of the pieces, each once."""
    return records.column("dtype").unique().to_pylist()


def version_digest(hashes: Iterable[bytes]) -> str:
    """The id of a version: the hash of its pieces' hashes in order, 32 hexadecimal digits."""
    return xxhash.xxh3_128(b"".join(hashes)).hexdigest()


def weights_digest(pieces: Iterable[Piece]) -> str:
    """The digest that a block of these pieces would have; nothing is kept."""
    hashes: list[bytes] = []
    for number, piece in enumerate(pieces):
        row = PieceRow.of(number, piece, bytes_of(piece.data))
        on_host = row.content.cpu().numpy()
        hashes.append(row.hash(on_host))
    return version_digest(hashes)


def dtype_name(tensor: Tensor) -> str:
    """Torch's name of a tensor's dtype, `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements of a tensor as uint8 [bytes], a view if it is contiguous."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    if not len(flat):  # an empty array's stride may be 0
        return torch.empty(0, dtype=torch.uint8)
    return flat.view(torch.uint8)


def require_complete(rows: Sequence[PieceRow]) -> None:
    """Raises RunError for a repeated name, or a number out of order."""
    seen: set[str] = set()
    for row in rows:
        if row.name in seen:
            problem = f"expected every piece once, found {row.name!r} twice"
            raise RunError(f"weights: {problem}. Fix: one row for each name.")
        seen.add(row.name)
    for place, row in enumerate(rows):
        if row.number != place:
            before = "at the beginning"
            if place:
                before = f"after {rows[place - 1].name!r}"
            other = f"{row.name!r}, which is piece {row.number}"
            problem = f"expected piece {place} {before}, found {other}"
            fix = "fetch the block that Offered names, all rows in order"
            raise RunError(f"weights: {problem}: one is missing or out of order. Fix: {fix}.")


def _copy_tensor(row: PieceRow, part: np.ndarray) -> bytes:
    """Copy a tensor into the block; returns the piece's hash."""
    import torch

    if len(part):
        torch.from_numpy(part).copy_(torch.as_tensor(row.content))
    return row.hash(part)


def _parts(column: pa.Array) -> list[np.ndarray]:
    """uint8 views of the values of a large_binary column."""
    _, starts, values = column.buffers()
    if not len(column):
        return []
    first, last = column.offset, column.offset + len(column)
    offsets = np.frombuffer(starts, dtype=np.int64)[first : last + 1]
    flat = np.frombuffer(values or b"", dtype=np.uint8)
    return [flat[low:high] for low, high in pairwise(offsets.tolist())]


def _tensor(row: PieceRow) -> Tensor:
    """The tensor over a row's bytes."""
    import torch

    part, shape = row.content, row.shape
    kind = None
    if row.dtype in DTYPES and min(shape, default=0) >= 0:
        kind = getattr(torch, row.dtype)
    if kind is None or len(part) != prod(shape) * kind.itemsize:
        problem = f"{len(part)} bytes are no {row.dtype} of shape {list(shape)}"
        fix = "writer and reader need the same version of this package"
        raise RunError(f"weights: piece {row.name!r}: {problem}. Fix: {fix}.")
    if not len(part):
        return torch.empty(shape, dtype=kind)
    if part.ctypes.data % kind.itemsize:  # after an odd number of narrow elements
        part = part.copy()
    # torch warns of read-only memory; it takes a ctypes array and keeps it and its owner alive.
    raw = (ctypes.c_uint8 * len(part)).from_address(part.ctypes.data)
    raw.owner = part  # type: ignore[attr-defined]
    return torch.frombuffer(raw, dtype=kind).reshape(shape)
