"""Record batches as lists of buffers, and back from buffers that cannot be trusted.

Owns: taking Arrow arrays apart into nodes (length, nulls) and buffers, putting them together again
after every check, checksums. Does not own: types (layout.py), memory and sockets (the transports).

Of a slice only its own rows and list values travel, with offsets from 0. Nothing is copied but the
offsets and bitmaps of slices.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import xxhash

from dataflow.errors import RunError
from engine.channels.layout import SchemaLayout, TypeLayout, layout_of

Node = tuple[int, int]
"""(length, nulls) of one array; a column of lists has two arrays, and so on."""
Buffers = list[pa.Buffer | None]
"""None and a buffer of 0 bytes both mean: absent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Framed:
    """A record batch taken apart."""

    layout: SchemaLayout
    rows: int
    nodes: list[Node]
    buffers: Buffers

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.size for buffer in self.buffers if buffer is not None)


def take_apart(records: pa.RecordBatch) -> Framed:
    """Take a record batch apart into nodes and buffers. Raises DataError for a column that does not
    travel.
    """
    layout = layout_of(records.schema)
    nodes: list[Node] = []
    buffers: Buffers = []
    for column, kind in zip(records.columns, layout.columns, strict=True):
        if not _simple_apart(column, kind, nodes, buffers):
            _apart(column, kind, nodes, buffers)
    return Framed(layout=layout, rows=records.num_rows, nodes=nodes, buffers=buffers)


_OFFSET = {4: struct.Struct("=i"), 8: struct.Struct("=q")}


def _simple_apart(array: pa.Array, kind: TypeLayout, nodes: list[Node], buffers: Buffers) -> bool:
    """_apart for the usual column: unsliced numbers, or lists of them, without nulls. Returns
    False for any other. It makes half as many Arrow objects, the main cost of a small batch.
    """
    array_buffers, count = array.buffers(), len(array)
    if array.offset or not kind.simple or not count or array_buffers[0] is not None:
        return False
    if not kind.children:
        nodes.append((count, 0))
        buffers += (None, array_buffers[1].slice(0, count * kind.width))
        return True
    values, width = array.values, kind.children[0].width
    (first,) = _OFFSET[kind.width].unpack_from(array_buffers[1], 0)
    (last,) = _OFFSET[kind.width].unpack_from(array_buffers[1], count * kind.width)
    if values.offset or first or not last or array_buffers[2] is not None:
        return False
    nodes += ((count, 0), (last, 0))
    offsets = array_buffers[1].slice(0, (count + 1) * kind.width)
    buffers += (None, offsets, None, array_buffers[3].slice(0, last * width))
    return True


def _apart(array: pa.Array, kind: TypeLayout, nodes: list[Node], buffers: Buffers) -> None:
    count, nulls = len(array), array.null_count
    nodes.append((count, nulls))
    if kind.code == "null":
        return
    array_buffers = array.buffers()
    bitmap = _bits(array_buffers[0], array.offset, count) if nulls else None
    buffers.append(bitmap)
    if kind.code in ("flat", "bits"):
        buffers.append(_values(array_buffers[1], kind, array.offset, count))
    elif kind.code == "text":
        first, last = _add_offsets(array, array_buffers[1], kind.width, buffers)
        buffers.append(array_buffers[2].slice(first, last - first) if last > first else None)
    else:
        children = _below(array, array_buffers, kind, buffers)
        for below, child in zip(children, kind.children, strict=True):
            _apart(below, child, nodes, buffers)


def _below(
    array: pa.Array, array_buffers: Buffers, kind: TypeLayout, buffers: Buffers
) -> list[pa.Array]:
    """The child arrays of lists, maps or structs, cut to its rows; offsets are appended."""
    if kind.code == "struct":
        return [array.field(index) for index in range(len(kind.children))]
    if kind.code == "fixed":
        size = kind.arrow.list_size
        return [array.values.slice(array.offset * size, len(array) * size)]
    first, last = _add_offsets(array, array_buffers[1], kind.width, buffers)
    if kind.code == "list":
        values = array.values
    else:
        fields = list(kind.children[0].arrow)
        values = pa.StructArray.from_arrays([array.keys, array.items], fields=fields)
    if last - first != len(values):
        values = values.slice(first, last - first)
    return [values]


def _values(
    packed: pa.Buffer | None, kind: TypeLayout, offset: int, count: int
) -> pa.Buffer | None:
    if packed is None or not count:
        return None
    if kind.code == "bits":
        return _bits(packed, offset, count)
    return packed.slice(offset * kind.width, count * kind.width)


def _bits(packed: pa.Buffer, offset: int, count: int) -> pa.Buffer:
    """`count` bits from bit `offset`, moved to bit 0."""
    if offset % 8 == 0:
        return packed.slice(offset // 8, (count + 7) // 8)
    packed_bytes = np.frombuffer(packed, np.uint8)[offset // 8 : (offset + count + 7) // 8]
    bits = np.unpackbits(packed_bytes, bitorder="little")[offset % 8 : offset % 8 + count]
    return pa.py_buffer(np.packbits(bits, bitorder="little"))


def _add_offsets(
    array: pa.Array, offsets: pa.Buffer | None, width: int, buffers: Buffers
) -> tuple[int, int]:
    """Append the offsets of an array's rows, from 0; returns the range of values they span."""
    if offsets is None or not offsets.size:
        buffers.append(pa.py_buffer(bytes(width)))
        return 0, 0
    mine = offsets.slice(array.offset * width, (len(array) + 1) * width)
    numbers = np.frombuffer(mine, np.int64 if width == 8 else np.int32)
    first, last = int(numbers[0]), int(numbers[-1])
    if first:
        mine = pa.py_buffer(numbers - numbers[0])
    buffers.append(mine)
    return first, last


def put_together(
    layout: SchemaLayout, rows: int, nodes: Sequence[Node], buffers: Buffers
) -> pa.RecordBatch:
    """Make the record batch over these buffers; nothing is copied and nothing is checked."""
    if not layout.columns:
        empty = pa.StructArray.from_buffers(pa.struct([]), rows, [None])
        return pa.RecordBatch.from_struct_array(empty)
    columns = []
    for kind, node, buffer in zip(layout.columns, layout.node, layout.buffer, strict=False):
        column = None
        if kind.simple:
            column = _simple_together(kind, nodes, node, buffers, buffer)
        if column is None:
            column = _together(kind, islice(nodes, node, None), islice(buffers, buffer, None))
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=layout.schema)


def put_together_checked(
    layout: SchemaLayout, rows: int, nodes: Sequence[Node], buffers: Buffers
) -> pa.RecordBatch:
    """put_together for a peer's buffers. Raises RunError where they do not fit together."""
    if len(nodes) != layout.node[-1] or len(buffers) != layout.buffer[-1]:
        raise RunError(
            f"expected {layout.node[-1]} arrays and {layout.buffer[-1]} buffers for its schema, "
            f"found {len(nodes)} and {len(buffers)}"
        )
    wrong = [nodes[first][0] for first in layout.node[:-1] if nodes[first][0] != rows]
    if wrong:
        raise RunError(f"expected {rows} rows in every column, found {wrong[0]}")
    for length, nulls in nodes:
        if not 0 <= nulls <= length < 2**48:
            raise RunError(f"an array of {length} values and {nulls} nulls")
    try:
        records = put_together(layout, rows, nodes, buffers)
        records.validate(full=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise RunError(f"columns that do not fit together: {error}") from error
    return records


_NOTHING = pa.py_buffer(b"")


def _simple_together(
    kind: TypeLayout, nodes: Sequence[Node], node: int, buffers: Buffers, buffer: int
) -> pa.Array | None:
    """_together for what _simple_apart takes apart; None for anything else."""
    length, nulls = nodes[node]
    if nulls or buffers[buffer] is not None:
        return None
    array_buffers = [None, buffers[buffer + 1] or _NOTHING]
    if not kind.children:
        return pa.Array.from_buffers(kind.arrow, length, array_buffers, 0)
    below, nulls = nodes[node + 1]
    if nulls or buffers[buffer + 2] is not None:
        return None
    inner = [None, buffers[buffer + 3] or _NOTHING]
    values = pa.Array.from_buffers(kind.children[0].arrow, below, inner, 0)
    return pa.Array.from_buffers(kind.arrow, length, array_buffers, 0, 0, [values])


def _together(
    kind: TypeLayout, nodes: Iterator[Node], buffers: Iterator[pa.Buffer | None]
) -> pa.Array:
    length, nulls = next(nodes)
    if kind.code == "null":
        return pa.nulls(length)
    array_buffers = [_validity(next(buffers), nulls)]
    if kind.code not in ("struct", "fixed"):
        count = 2 if kind.code == "text" else 1
        array_buffers += [buffer or _NOTHING for buffer in islice(buffers, count)]
    if not kind.children:
        return pa.Array.from_buffers(kind.arrow, length, array_buffers, nulls)
    children = [_together(child, nodes, buffers) for child in kind.children]
    return pa.Array.from_buffers(kind.arrow, length, array_buffers, nulls, children=children)


def _validity(bitmap: pa.Buffer | None, nulls: int) -> pa.Buffer | None:
    """The null bitmap. Raises RunError where it contradicts the null count."""
    if bool(nulls) != (bitmap is not None and bitmap.size > 0):
        which = "with" if bitmap else "without"
        raise RunError(f"an array of {nulls} nulls {which} a null bitmap")
    if not nulls:
        return None
    return bitmap


def checksums(buffers: Sequence[pa.Buffer | None]) -> list[int]:
    """Hash each buffer by xxh3 (64 bits); 0 for an absent one."""
    hash_of = xxhash.xxh3_64_intdigest
    return [hash_of(buffer) if buffer is not None and buffer.size else 0 for buffer in buffers]


_HOT = 256 << 10
"""Bytes that are copied and hashed at a time, while they are in the cache."""


def copy_summed(buffer: pa.Buffer, target: np.ndarray) -> int:
    """Copy a buffer into uint8 [its size] and return its xxh3; reads memory once for both."""
    source, digest = np.frombuffer(buffer, np.uint8), xxhash.xxh3_64()
    for start in range(0, len(source), _HOT):
        target[start : start + _HOT] = source[start : start + _HOT]
        digest.update(target[start : start + _HOT].data)
    return digest.intdigest()
