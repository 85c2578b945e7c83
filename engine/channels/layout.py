"""The buffer layout of Arrow types and schemas, and which types can travel between Workers.

Owns: a column's number of arrays and buffers, a schema's bytes and their hash. Does not own: the
buffers (frames.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import Literal

import pyarrow as pa
import xxhash

from dataflow.errors import DataError, RunError
from engine.channels.projection import column_indices

LARGEST_SCHEMA = 1 << 20
"""Bytes."""

Code = Literal["null", "flat", "bits", "text", "list", "map", "fixed", "struct"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TypeLayout:
    """A type. width: bytes of a flat value, or of an offset of text, lists and maps; else 0. nodes,
    buffers: with those of the children. simple: flat values, or lists of them.
    """

    arrow: pa.DataType
    code: Code
    width: int
    children: tuple[TypeLayout, ...]
    nodes: int
    buffers: int
    simple: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SchemaLayout:
    """A schema. encoded: its Arrow IPC message; hash: the xxh3 of that, 8 bytes. node, buffer:
    where each column begins among the nodes and buffers, and where the last one ends.
    """

    schema: pa.Schema
    encoded: bytes
    hash: bytes
    columns: tuple[TypeLayout, ...]
    node: tuple[int, ...]
    buffer: tuple[int, ...]


def layout_of(schema: pa.Schema) -> SchemaLayout:
    """A schema's layout. Raises DataError naming the column whose type cannot travel."""
    return _cached_layout(schema.serialize().to_pybytes())


def layout_from(encoded: bytes) -> SchemaLayout:
    """The layout of a schema's bytes. Raises RunError for any other bytes."""
    size = len(encoded)
    if size > LARGEST_SCHEMA:
        raise RunError(f"expected a schema of at most {LARGEST_SCHEMA} bytes, found one of {size}")
    try:
        return _cached_layout(encoded)
    except (pa.ArrowException, OSError, ValueError) as error:
        problem = f"expected an Arrow schema of plain types, found {size} other bytes: {error}"
        raise RunError(problem) from error


@lru_cache(maxsize=1024)
def select_layout(
    layout: SchemaLayout, columns: tuple[str, ...]
) -> tuple[SchemaLayout, tuple[int, ...], tuple[int, ...]]:
    """These columns' layout (none: all), nodes' and buffers' indices. Raises DataError."""
    index = column_indices(layout.schema.names, columns)
    selected = layout
    if columns:
        schema = pa.schema([layout.schema.field(i) for i in index])
        selected = _schema_layout(schema, schema.serialize().to_pybytes())
    return selected, _indices_of(index, layout.node), _indices_of(index, layout.buffer)


def _indices_of(columns: Sequence[int], begins: Sequence[int]) -> tuple[int, ...]:
    """All nodes, or buffers, of these columns. begins: where each column's begin."""
    spans = (range(begins[column], begins[column + 1]) for column in columns)
    return tuple(chain.from_iterable(spans))


@lru_cache(maxsize=256)
def _cached_layout(encoded: bytes) -> SchemaLayout:
    return _schema_layout(pa.ipc.read_schema(pa.py_buffer(encoded)), encoded)


def _schema_layout(schema: pa.Schema, encoded: bytes) -> SchemaLayout:
    columns = tuple(map(_column, schema))
    node_counts = [column.nodes for column in columns]
    buffer_counts = [column.buffers for column in columns]
    return SchemaLayout(
        schema=schema,
        encoded=encoded,
        hash=xxhash.xxh3_64_digest(encoded),
        columns=columns,
        node=tuple(accumulate(node_counts, initial=0)),
        buffer=tuple(accumulate(buffer_counts, initial=0)),
    )


def _column(field: pa.Field) -> TypeLayout:
    try:
        return _type_layout(field.type)
    except DataError as error:
        raise DataError(f"column {field.name!r}: {error}") from error


def _type_layout(kind: pa.DataType) -> TypeLayout:
    code, width = _code(kind)
    if code == "map":
        below = [pa.struct([kind.key_field, kind.item_field])]
    else:
        below = [kind.field(i).type for i in range(kind.num_fields)]
    children = tuple(map(_type_layout, below))
    buffer_count = {"null": 0, "struct": 1, "fixed": 1, "text": 3}.get(code, 2)
    return TypeLayout(
        arrow=kind,
        code=code,
        width=width,
        children=children,
        nodes=1 + sum(c.nodes for c in children),
        buffers=buffer_count + sum(c.buffers for c in children),
        simple=code == "flat" or (code == "list" and children[0].code == "flat"),
    )


_CODES: tuple[tuple[Callable[[pa.DataType], bool], Code, int], ...] = (
    (pa.types.is_null, "null", 0),
    (pa.types.is_boolean, "bits", 0),
    (pa.types.is_primitive, "flat", 0),
    (pa.types.is_decimal, "flat", 0),
    (pa.types.is_fixed_size_binary, "flat", 0),
    (pa.types.is_string, "text", 4),
    (pa.types.is_binary, "text", 4),
    (pa.types.is_large_string, "text", 8),
    (pa.types.is_large_binary, "text", 8),
    (pa.types.is_map, "map", 4),
    (pa.types.is_list, "list", 4),
    (pa.types.is_large_list, "list", 8),
    (pa.types.is_fixed_size_list, "fixed", 0),
    (pa.types.is_struct, "struct", 0),
)
"""The first that fits counts; the width of flat values is that of their type."""


def _code(kind: pa.DataType) -> tuple[Code, int]:
    """(code, width). Raises DataError for a type that cannot travel."""
    if not isinstance(kind, pa.BaseExtensionType):
        for fits, code, width in _CODES:
            if fits(kind):
                if code == "flat":
                    width = kind.bit_width // 8
                return code, width
    raise DataError(
        f"expected numbers, text, lists or structs, found {kind}, which does not travel between"
        " Workers. Fix: cast the column where it is made"
    )
