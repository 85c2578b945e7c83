"""Record batches as lists of buffers, and back from buffers that nobody vouches for.

Owns: taking Arrow arrays apart into nodes (length, nulls) and buffers, putting them together
again with every check that keeps wrong numbers from being read, and which types may travel.
Does not own: where the bytes lie (slabs.py), nor how they are sent (shm.py, zmq.py).

Only what is looked at travels: of a slice its rows, of a list column the values that its rows
have. Offsets then start at 0. Nothing is copied but offsets and bitmaps of slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import xxhash

from dataflow.errors import DataError, RunError

Node = tuple[int, int]
"""(length, nulls) of one array; a column of lists has two arrays, and so on."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How many nodes and buffers a type has."""

    nodes: int
    buffers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where each column of a schema begins among the nodes and buffers of its record batch, and the last one ends."""

    node: tuple[int, ...]
    buffer: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Framed:
    """A record batch taken apart. A buffer of None or of no bytes is not there."""

    schema: pa.Schema
    rows: int
    nodes: list[Node]
    buffers: list[pa.Buffer | None]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.size for b in self.buffers if b is not None)


# --- types ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def shape(kind: pa.DataType) -> Shape:
    """Nodes and buffers of a type. Raises DataError for one that does not travel between Workers."""
    if pa.types.is_null(kind):
        return Shape(1, 0)
    if _is_text(kind):
        return Shape(1, 3)
    inner = [shape(field.type) for field in _children(kind)]
    own = 1 if pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind) else 2
    return Shape(1 + sum(s.nodes for s in inner), own + sum(s.buffers for s in inner))


@lru_cache(maxsize=1024)
def places(schema: pa.Schema) -> Places:
    """Where each column begins. Raises DataError naming the column whose type does not travel."""
    node, buffer = [0], [0]
    for field in schema:
        try:
            own = shape(field.type)
        except DataError as error:
            raise DataError(f"column {field.name!r}: {error}") from error
        node.append(node[-1] + own.nodes)
        buffer.append(buffer[-1] + own.buffers)
    return Places(node=tuple(node), buffer=tuple(buffer))


def _is_text(kind: pa.DataType) -> bool:
    return any(
        (
            pa.types.is_string(kind),
            pa.types.is_large_string(kind),
            pa.types.is_binary(kind),
            pa.types.is_large_binary(kind),
        )
    )


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind)


def _is_wide(kind: pa.DataType) -> bool:
    """Whether its offsets are int64."""
    return pa.types.is_large_list(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)


def _is_flat(kind: pa.DataType) -> bool:
    """Values of one width, side by side."""
    plain = pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_fixed_size_binary(kind)
    return plain and not isinstance(kind, pa.BaseExtensionType)


def _children(kind: pa.DataType) -> list[pa.Field]:
    """The fields of a nested type; none for a flat one. Raises DataError for a type that does not travel."""
    if _is_flat(kind):
        return []
    if _is_list(kind) or pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind):
        if pa.types.is_map(kind):
            return [pa.field("entries", pa.struct([kind.key_field, kind.item_field]), nullable=False)]
        return [kind.field(i) for i in range(kind.num_fields)]
    raise DataError(
        f"expected numbers, text, lists or structs, found {kind}, which does not travel between Workers. "
        "Fix: cast the column where it is made"
    )


# --- apart ---------------------------------------------------------------------------------------------------------


def taken_apart(records: pa.RecordBatch) -> Framed:
    """Nodes and buffers of a record batch. Raises DataError for a column whose type does not travel."""
    places(records.schema)
    nodes: list[Node] = []
    buffers: list[pa.Buffer | None] = []
    for column in records.columns:
        _apart(column, nodes, buffers)
    return Framed(schema=records.schema, rows=records.num_rows, nodes=nodes, buffers=buffers)


def _apart(array: pa.Array, nodes: list[Node], buffers: list[pa.Buffer | None]) -> None:
    kind, count = array.type, len(array)
    nodes.append((count, array.null_count))
    if pa.types.is_null(kind):
        return
    own = array.buffers()
    buffers.append(_bits(own[0], array.offset, count) if array.null_count else None)
    if _is_text(kind):
        first, last = _add_offsets(array, own[1], buffers)
        buffers.append(own[2].slice(first, last - first) if last > first else None)
    elif _is_list(kind):
        first, last = _add_offsets(array, own[1], buffers)
        values = array.values if not pa.types.is_map(kind) else _entries(array)
        _apart(values.slice(first, last - first), nodes, buffers)
    elif pa.types.is_fixed_size_list(kind):
        _apart(array.values.slice(array.offset * kind.list_size, count * kind.list_size), nodes, buffers)
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            _apart(array.field(index), nodes, buffers)
    else:
        buffers.append(_values(own[1], kind.bit_width, array.offset, count))


def _entries(array: pa.Array) -> pa.Array:
    """The struct of keys and items below a map, from its first entry."""
    (entries,) = _children(array.type)
    return pa.StructArray.from_arrays([array.keys, array.items], fields=list(entries.type))


def _values(data: pa.Buffer | None, width: int, offset: int, count: int) -> pa.Buffer | None:
    if data is None or not count:
        return None
    if width == 1:
        return _bits(data, offset, count)
    return data.slice(offset * width // 8, count * width // 8)


def _bits(data: pa.Buffer, offset: int, count: int) -> pa.Buffer:
    """`count` bits from bit `offset` on, beginning at bit 0 of a byte."""
    if offset % 8 == 0:
        return data.slice(offset // 8, (count + 7) // 8)
    packed = np.frombuffer(data, np.uint8)[offset // 8 : (offset + count + 7) // 8]
    bits = np.unpackbits(packed, bitorder="little")[offset % 8 : offset % 8 + count]
    return pa.py_buffer(np.packbits(bits, bitorder="little"))


def _add_offsets(array: pa.Array, data: pa.Buffer | None, buffers: list[pa.Buffer | None]) -> tuple[int, int]:
    """Append the offsets of an array's rows, from 0; returns which values they span."""
    width = 8 if _is_wide(array.type) else 4
    if data is None or not data.size:
        buffers.append(pa.py_buffer(bytes(width)))
        return 0, 0
    mine = data.slice(array.offset * width, (len(array) + 1) * width)
    numbers = np.frombuffer(mine, np.int64 if width == 8 else np.int32)
    first, last = int(numbers[0]), int(numbers[-1])
    buffers.append(mine if first == 0 else pa.py_buffer(numbers - numbers[0]))
    return first, last


# --- together ------------------------------------------------------------------------------------------------------


def put_together(
    schema: pa.Schema, rows: int, nodes: Sequence[Node], buffers: Sequence[pa.Buffer | None]
) -> pa.RecordBatch:
    """The record batch over these buffers; nothing is copied and nothing is checked."""
    if not len(schema):
        return _without_columns(rows)
    node, buffer = iter(nodes), iter(buffers)
    columns = [_together(field.type, node, buffer) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def checked_together(
    schema: pa.Schema, rows: int, nodes: Sequence[Node], buffers: Sequence[pa.Buffer | None]
) -> pa.RecordBatch:
    """As put_together, of what came from a peer. Raises RunError (naming no peer) for what does not fit together."""
    here = places(schema)
    if len(nodes) != here.node[-1] or len(buffers) != here.buffer[-1]:
        raise RunError(
            f"expected {here.node[-1]} arrays and {here.buffer[-1]} buffers for its schema, "
            f"found {len(nodes)} and {len(buffers)}"
        )
    wrong = [nodes[first][0] for first in here.node[:-1] if nodes[first][0] != rows]
    if wrong:
        raise RunError(f"expected {rows} rows in every column, found {wrong[0]}")
    for length, nulls in nodes:
        if not 0 <= nulls <= length < 2**48:
            raise RunError(f"an array of {length} values and {nulls} nulls")
    try:
        records = put_together(schema, rows, nodes, buffers)
        records.validate(full=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise RunError(f"columns that do not fit together: {error}") from error
    return records


def _without_columns(rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), rows, [None]))


def _together(kind: pa.DataType, nodes: Iterator[Node], buffers: Iterator[pa.Buffer | None]) -> pa.Array:
    length, nulls = next(nodes)
    if pa.types.is_null(kind):
        return pa.nulls(length)
    valid = next(buffers) if nulls else _skipped(buffers)
    if _is_text(kind):
        return pa.Array.from_buffers(kind, length, [valid, _there(next(buffers)), _there(next(buffers))], nulls)
    inner = _children(kind)
    own = [valid] if pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind) else [valid, _there(next(buffers))]
    children = [_together(field.type, nodes, buffers) for field in inner]
    return pa.Array.from_buffers(kind, length, own, nulls, children=children or None)


_NOTHING = pa.py_buffer(b"")


def _there(buffer: pa.Buffer | None) -> pa.Buffer:
    return _NOTHING if buffer is None else buffer


def _skipped(buffers: Iterator[pa.Buffer | None]) -> None:
    next(buffers)


# --- content -------------------------------------------------------------------------------------------------------


def checksums(buffers: Sequence[pa.Buffer | None]) -> list[int]:
    """xxh3 (64 bits) of each buffer, 0 for one that is not there."""
    return [0 if b is None or not b.size else xxhash.xxh3_64_intdigest(b) for b in buffers]


def schema_bytes(schema: pa.Schema) -> bytes:
    """A schema as an Arrow IPC message."""
    return schema.serialize().to_pybytes()


def schema_of(data: bytes) -> pa.Schema:
    """The inverse. Raises RunError (without a name) for what is no schema, or one with types that do not travel."""
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data))
        places(schema)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RunError(f"expected an Arrow schema of plain types, found {len(data)} other bytes: {error}") from error
    return schema
