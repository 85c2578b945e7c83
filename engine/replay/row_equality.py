"""Whether two rows are the same, bit by bit, and where they first differ.

Owns: the comparison of columns, the place in a list. Does not own: which rows are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.safe_text import one_line
from engine.protocol.refs import Key

_SHOWN = 60
"""Letters of a cell that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellDifference:
    """The first difference of two tables: of the first row, its first column. at: the index in a
    list column, where both have that element; else None. a, b: the values there.
    """

    row: int
    column: str
    a: Any
    b: Any
    at: int | None = None

    @property
    def place(self) -> str:
        """`column`, or `column[3]` in a list."""
        if self.at is None:
            return self.column
        return f"{self.column}[{self.at}]"

    def __str__(self) -> str:
        return f"{self.place}: {_shorten(self.a)} and {_shorten(self.b)}"


def first_difference(a: pa.Table, b: pa.Table, columns: Sequence[str]) -> CellDifference | None:
    """Find where two tables of equal length first differ, in order of rows, then of these columns;
    None if all bits are the same.
    """
    difference: CellDifference | None = None
    for name in columns:
        x = _join_chunks(a.column(name))
        y = _join_chunks(b.column(name))
        if difference is not None:
            # Only an earlier row counts: of the same row the earlier column does.
            x = x.slice(0, difference.row)
            y = y.slice(0, difference.row)
        row = _find_row(x, y)
        if row is not None:
            difference = _describe_cell(name, x, y, row)
    return difference


def describe_key(key: Key) -> str:
    """A row's key in words."""
    position, sample, attempt = key
    return f"(position {position}, sample {sample}, attempt {attempt})"


def _join_chunks(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks)


def _find_row(x: pa.Array, y: pa.Array) -> int | None:
    """The first row that differs."""
    if len(x) == 0:
        return None
    if _is_list(x.type) and _is_list(y.type):
        return _find_list(x, y)
    return _first_true(_differ(x, y))


def _find_list(x: pa.Array, y: pa.Array) -> int | None:
    """The first row whose lists differ, in length or in an element."""
    x_lengths, y_lengths = _lengths(x), _lengths(y)
    other_length = _first_true(x_lengths != y_lengths)
    # Up to there all lengths are the same, so that elements stand beside each other when flat.
    count = len(x) if other_length is None else other_length
    x_elements = x.slice(0, count).flatten()
    y_elements = y.slice(0, count).flatten()
    element = _find_row(x_elements, y_elements)
    if element is None:
        return other_length
    # A null has length -1 and no elements.
    ends = np.cumsum(np.maximum(x_lengths[:count], 0))
    return int(np.searchsorted(ends, element, side="right"))


def _differ(x: pa.Array, y: pa.Array) -> np.ndarray:
    """Boolean: which elements differ."""
    if pa.types.is_floating(x.type) and x.type == y.type:
        # As integers: NaN equals itself, and 0.0 is not -0.0.
        bits_type = np.dtype(f"u{x.type.bit_width // 8}")
        x_bits = _numbers(x).view(bits_type)
        y_bits = _numbers(y).view(bits_type)
        x_null, y_null = _nulls(x), _nulls(y)
        return (x_null != y_null) | (~x_null & (x_bits != y_bits))
    if pa.types.is_nested(x.type) or x.type != y.type:
        pairs = zip(x.to_pylist(), y.to_pylist(), strict=True)
        return np.array([repr(one) != repr(other) for one, other in pairs], dtype=bool)
    equal = pc.call_function("equal", [x, y]).fill_null(False).to_numpy(zero_copy_only=False)
    return ~(equal | (_nulls(x) & _nulls(y)))


def _nulls(array: pa.Array) -> np.ndarray:
    return array.is_null().to_numpy(zero_copy_only=False)


def _lengths(lists: pa.Array) -> np.ndarray:
    """Of each list; -1 for none."""
    return pc.call_function("list_value_length", [lists]).fill_null(-1).to_numpy()


def _numbers(array: pa.Array) -> np.ndarray:
    """The elements as they are in memory; what stands for a null is of no account."""
    dtype = array.type.to_pandas_dtype()
    if array.null_count == 0:
        return np.ascontiguousarray(array.to_numpy())
    numbers = np.frombuffer(array.buffers()[1], dtype=dtype)
    return np.ascontiguousarray(numbers[array.offset : array.offset + len(array)])


def _first_true(is_different: np.ndarray) -> int | None:
    return int(is_different.argmax()) if is_different.any() else None


def _describe_cell(column: str, x: pa.Array, y: pa.Array, row: int) -> CellDifference:
    """The difference of a row; of lists that both have, that of their first element."""
    are_lists = _is_list(x.type) and _is_list(y.type)
    if not are_lists or not (x[row].is_valid and y[row].is_valid):
        return CellDifference(row=row, column=column, a=x[row].as_py(), b=y[row].as_py())
    one, other = x[row].values, y[row].values
    count = min(len(one), len(other))
    at = _find_row(one.slice(0, count), other.slice(0, count))
    if at is None:
        a = f"{len(one)} elements"
        b = f"{len(other)} elements"
    else:
        a = one[at].as_py()
        b = other[at].as_py()
    return CellDifference(row=row, column=column, at=at, a=a, b=b)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _shorten(cell: Any) -> str:
    text = one_line(repr(cell))
    if len(text) > _SHOWN:
        return f"{text[: _SHOWN - 3]}..."
    return text
