"""Record batches as lists of buffers, and back from buffers that nobody vouches for.

Owns: taking Arrow arrays apart into nodes (length, nulls) and buffers, putting them together
again with every check that keeps wrong numbers from being read, and which types may travel.
Does not own: where the bytes lie (slabs.py), nor how they are sent (shm.py, zmq.py).

Only what is looked at travels: of a slice its rows, of a list column the values that its rows
have. Offsets then start at 0. Nothing is copied but offsets and bitmaps of slices.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from typing import Literal

import numpy as np
import pyarrow as pa
import xxhash

from dataflow.errors import DataError, RunError
from engine.channels.projection import named

Node = tuple[int, int]
"""(length, nulls) of one array; a column of lists has two arrays, and so on."""


LARGEST_SCHEMA = 1 << 20
"""Bytes of a schema that a peer may have."""

Code = Literal["null", "flat", "bits", "text", "list", "map", "fixed", "struct"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TypeLayout:
    """A type as its buffers lie. width: bytes of a flat value, of an offset of text, lists and
    maps; else 0.

    nodes and buffers count those of the children, too. simple: flat values, or lists of such.
    """

    kind: pa.DataType
    code: Code
    width: int
    children: tuple[TypeLayout, ...]
    nodes: int
    buffers: int
    simple: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SchemaLayout:
    """A schema as the buffers of its record batches lie, with its bytes (an Arrow IPC message) and
    their xxh3.

    node and buffer: where each column begins among the nodes and buffers, and where the last one
    ends.
    """

    schema: pa.Schema
    data: bytes
    hash: int
    columns: tuple[TypeLayout, ...]
    node: tuple[int, ...]
    buffer: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Framed:
    """A record batch taken apart. A buffer of None or of no bytes is not there."""

    forms: SchemaLayout
    rows: int
    nodes: list[Node]
    buffers: list[pa.Buffer | None]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.size for b in self.buffers if b is not None)


# --- types ----------------------------------------------------------------------------------------


def forms_of(schema: pa.Schema) -> SchemaLayout:
    """Raises DataError naming the column whose type does not travel."""
    return _forms(schema.serialize().to_pybytes())


def forms_from(data: bytes) -> SchemaLayout:
    """Of the bytes of a schema. Raises RunError (naming no peer) for what is none, or has types
    that do not travel.
    """
    if len(data) > LARGEST_SCHEMA:
        raise RunError(
            f"expected a schema of at most {LARGEST_SCHEMA} bytes, found one of {len(data)}"
        )
    try:
        return _forms(data)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RunError(
            f"expected an Arrow schema of plain types, found {len(data)} other bytes: {error}"
        ) from error


@lru_cache(maxsize=256)
def _forms(data: bytes) -> SchemaLayout:
    return _made(pa.ipc.read_schema(pa.py_buffer(data)), data)


@lru_cache(maxsize=1024)
def chosen(forms: SchemaLayout, columns: tuple[str, ...]) -> tuple[SchemaLayout, tuple[int, ...]]:
    """The forms of the columns asked for (all where none is named), and their indices.

    Raises DataError for one that is not there.
    """
    index = tuple(named(forms.schema.names, columns))
    if not columns:
        return forms, index
    schema = pa.schema([forms.schema.field(i) for i in index])
    return _made(schema, schema.serialize().to_pybytes()), index


def _made(schema: pa.Schema, data: bytes) -> SchemaLayout:
    columns = tuple(_column(field) for field in schema)
    return SchemaLayout(
        schema=schema,
        data=data,
        hash=xxhash.xxh3_64_intdigest(data),
        columns=columns,
        node=tuple(accumulate((c.nodes for c in columns), initial=0)),
        buffer=tuple(accumulate((c.buffers for c in columns), initial=0)),
    )


def _column(field: pa.Field) -> TypeLayout:
    try:
        return _form(field.type)
    except DataError as error:
        raise DataError(f"column {field.name!r}: {error}") from error


def _form(kind: pa.DataType) -> TypeLayout:
    code, width = _code(kind)
    children = tuple(_form(child) for child in _children(kind, code))
    own = {"null": 0, "struct": 1, "fixed": 1, "text": 3}.get(code, 2)
    return TypeLayout(
        kind=kind,
        code=code,
        width=width,
        children=children,
        nodes=1 + sum(c.nodes for c in children),
        buffers=own + sum(c.buffers for c in children),
        simple=code == "flat" or (code == "list" and children[0].code == "flat"),
    )


def _code(kind: pa.DataType) -> tuple[Code, int]:
    """Raises DataError for a type that does not travel between Workers."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        raise _does_not_travel(kind)
    if types.is_null(kind):
        return "null", 0
    if types.is_boolean(kind):
        return "bits", 0
    if types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind):
        return "flat", kind.bit_width // 8
    for tests, width in (
        ((types.is_string, types.is_binary), 4),
        ((types.is_large_string, types.is_large_binary), 8),
    ):
        if any(test(kind) for test in tests):
            return "text", width
    if types.is_map(kind):
        return "map", 4
    if types.is_list(kind) or types.is_large_list(kind):
        return "list", 4 if types.is_list(kind) else 8
    if types.is_fixed_size_list(kind):
        return "fixed", 0
    if types.is_struct(kind):
        return "struct", 0
    raise _does_not_travel(kind)


def _children(kind: pa.DataType, code: Code) -> list[pa.DataType]:
    if code == "map":
        return [pa.struct([kind.key_field, kind.item_field])]
    if code in ("list", "fixed", "struct"):
        return [kind.field(i).type for i in range(kind.num_fields)]
    return []


def _does_not_travel(kind: pa.DataType) -> DataError:
    return DataError(
        f"expected numbers, text, lists or structs, found {kind}, which does not travel between"
        " Workers. Fix: cast the column where it is made"
    )


# --- apart ----------------------------------------------------------------------------------------


def taken_apart(records: pa.RecordBatch) -> Framed:
    """Nodes and buffers of a record batch. Raises DataError for a column whose type does not
    travel.
    """
    forms = forms_of(records.schema)
    nodes: list[Node] = []
    buffers: list[pa.Buffer | None] = []
    for column, form in zip(records.columns, forms.columns, strict=True):
        if not _simple_apart(column, form, nodes, buffers):
            _apart(column, form, nodes, buffers)
    return Framed(forms=forms, rows=records.num_rows, nodes=nodes, buffers=buffers)


_OFFSET = {4: struct.Struct("=i"), 8: struct.Struct("=q")}


def _simple_apart(
    array: pa.Array, form: TypeLayout, nodes: list[Node], buffers: list[pa.Buffer | None]
) -> bool:
    """As _apart, of the columns that most are: numbers, or lists of numbers, from their first on,
    and none null.

    Returns whether it is one of those. It asks Arrow for half as many objects, of which a small
    batch costs most.
    """
    own, count = array.buffers(), len(array)
    if array.offset or not form.simple or not count or own[0] is not None:
        return False
    if not form.children:
        nodes.append((count, 0))
        buffers += (None, own[1].slice(0, count * form.width))
        return True
    values, child = array.values, form.children[0]
    offset = _OFFSET[form.width]
    (first,), (last,) = (
        offset.unpack_from(own[1], 0),
        offset.unpack_from(own[1], count * form.width),
    )
    if values.offset or first or not last or own[2] is not None:
        return False
    nodes += ((count, 0), (last, 0))
    buffers += (
        None,
        own[1].slice(0, (count + 1) * form.width),
        None,
        own[3].slice(0, last * child.width),
    )
    return True


def _apart(
    array: pa.Array, form: TypeLayout, nodes: list[Node], buffers: list[pa.Buffer | None]
) -> None:
    code, count, nulls = form.code, len(array), array.null_count
    nodes.append((count, nulls))
    if code == "null":
        return
    own = array.buffers()
    buffers.append(_bits(own[0], array.offset, count) if nulls else None)
    if code == "flat" or code == "bits":
        buffers.append(_values(own[1], form, array.offset, count))
    elif code == "text":
        first, last = _add_offsets(array, own[1], form.width, buffers)
        buffers.append(own[2].slice(first, last - first) if last > first else None)
    elif code == "list" or code == "map":
        first, last = _add_offsets(array, own[1], form.width, buffers)
        values = array.values if code == "list" else _entries(array, form.children[0].kind)
        if last - first < len(values):
            values = values.slice(first, last - first)
        _apart(values, form.children[0], nodes, buffers)
    elif code == "fixed":
        size = form.kind.list_size
        _apart(
            array.values.slice(array.offset * size, count * size), form.children[0], nodes, buffers
        )
    else:
        for index, child in enumerate(form.children):
            _apart(array.field(index), child, nodes, buffers)


def _entries(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The struct of keys and items below a map, from its first entry."""
    return pa.StructArray.from_arrays([array.keys, array.items], fields=list(kind))


def _values(data: pa.Buffer | None, form: TypeLayout, offset: int, count: int) -> pa.Buffer | None:
    if data is None or not count:
        return None
    if form.code == "bits":
        return _bits(data, offset, count)
    return data.slice(offset * form.width, count * form.width)


def _bits(data: pa.Buffer, offset: int, count: int) -> pa.Buffer:
    """`count` bits from bit `offset` on, beginning at bit 0 of a byte."""
    if offset % 8 == 0:
        return data.slice(offset // 8, (count + 7) // 8)
    packed = np.frombuffer(data, np.uint8)[offset // 8 : (offset + count + 7) // 8]
    bits = np.unpackbits(packed, bitorder="little")[offset % 8 : offset % 8 + count]
    return pa.py_buffer(np.packbits(bits, bitorder="little"))


def _add_offsets(
    array: pa.Array, data: pa.Buffer | None, width: int, buffers: list[pa.Buffer | None]
) -> tuple[int, int]:
    """Append the offsets of an array's rows, from 0; returns which values they span."""
    if data is None or not data.size:
        buffers.append(pa.py_buffer(bytes(width)))
        return 0, 0
    mine = data.slice(array.offset * width, (len(array) + 1) * width)
    numbers = np.frombuffer(mine, np.int64 if width == 8 else np.int32)
    first, last = int(numbers[0]), int(numbers[-1])
    buffers.append(mine if first == 0 else pa.py_buffer(numbers - numbers[0]))
    return first, last


# --- together -------------------------------------------------------------------------------------


def put_together(
    forms: SchemaLayout, rows: int, nodes: Sequence[Node], buffers: Sequence[pa.Buffer | None]
) -> pa.RecordBatch:
    """The record batch over these buffers; nothing is copied and nothing is checked."""
    if not forms.columns:
        return pa.RecordBatch.from_struct_array(
            pa.StructArray.from_buffers(pa.struct([]), rows, [None])
        )
    columns = []
    for form, node, buffer in zip(forms.columns, forms.node, forms.buffer, strict=False):
        column = _simple_together(form, nodes, node, buffers, buffer) if form.simple else None
        columns.append(
            _together(form, islice(nodes, node, None), islice(buffers, buffer, None))
            if column is None
            else column
        )
    return pa.RecordBatch.from_arrays(columns, schema=forms.schema)


def checked_together(
    forms: SchemaLayout, rows: int, nodes: Sequence[Node], buffers: Sequence[pa.Buffer | None]
) -> pa.RecordBatch:
    """As put_together, of what came from a peer. Raises RunError (naming no peer) for what does not
    fit together.
    """
    if len(nodes) != forms.node[-1] or len(buffers) != forms.buffer[-1]:
        raise RunError(
            f"expected {forms.node[-1]} arrays and {forms.buffer[-1]} buffers for its schema, "
            f"found {len(nodes)} and {len(buffers)}"
        )
    wrong = [nodes[first][0] for first in forms.node[:-1] if nodes[first][0] != rows]
    if wrong:
        raise RunError(f"expected {rows} rows in every column, found {wrong[0]}")
    for length, nulls in nodes:
        if not 0 <= nulls <= length < 2**48:
            raise RunError(f"an array of {length} values and {nulls} nulls")
    try:
        records = put_together(forms, rows, nodes, buffers)
        records.validate(full=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise RunError(f"columns that do not fit together: {error}") from error
    return records


_NOTHING = pa.py_buffer(b"")


def _simple_together(
    form: TypeLayout,
    nodes: Sequence[Node],
    node: int,
    buffers: Sequence[pa.Buffer | None],
    buffer: int,
) -> pa.Array | None:
    """As _together, of what _simple_apart takes apart; None where it is something else."""
    length, nulls = nodes[node]
    if nulls or buffers[buffer] is not None:
        return None
    own = [None, buffers[buffer + 1] or _NOTHING]
    if not form.children:
        return pa.Array.from_buffers(form.kind, length, own, 0)
    below, nulls = nodes[node + 1]
    if nulls or buffers[buffer + 2] is not None:
        return None
    values = pa.Array.from_buffers(
        form.children[0].kind, below, [None, buffers[buffer + 3] or _NOTHING], 0
    )
    return pa.Array.from_buffers(form.kind, length, own, 0, 0, [values])


def _together(
    form: TypeLayout, nodes: Iterator[Node], buffers: Iterator[pa.Buffer | None]
) -> pa.Array:
    length, nulls = next(nodes)
    code = form.code
    if code == "null":
        return pa.nulls(length)
    valid = next(buffers)
    if bool(nulls) != (
        valid is not None and valid.size > 0
    ):  # nulls that are counted away would be values
        raise RunError(
            f"an array with {nulls} nulls {'with' if valid else 'without'} a map of them"
        )
    own = [valid if nulls else None]
    if code != "struct" and code != "fixed":
        own += [
            b if b is not None else _NOTHING for b in islice(buffers, 2 if code == "text" else 1)
        ]
    if not form.children:
        return pa.Array.from_buffers(form.kind, length, own, nulls)
    children = [_together(child, nodes, buffers) for child in form.children]
    return pa.Array.from_buffers(form.kind, length, own, nulls, children=children)


# --- content --------------------------------------------------------------------------------------


def checksums(buffers: Sequence[pa.Buffer | None]) -> list[int]:
    """xxh3 (64 bits) of each buffer, 0 for one that is not there."""
    return [0 if b is None or not b.size else xxhash.xxh3_64_intdigest(b) for b in buffers]


_HOT = 256 << 10
"""Bytes that are copied and then summed up at a time, while they are in the cache."""


def copy_summed(buffer: pa.Buffer, target: np.ndarray) -> int:
    """Copy a buffer into uint8 [its size], and give its xxh3: memory is read once for both."""
    source, digest = np.frombuffer(buffer, np.uint8), xxhash.xxh3_64()
    for start in range(0, len(source), _HOT):
        target[start : start + _HOT] = source[start : start + _HOT]
        digest.update(target[start : start + _HOT].data)
    return digest.intdigest()
