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

    def __str__(self) -> str:
        where = self.column if self.at is None else f"{self.column}[{self.at}]"
        return f"{where}: {_shown(self.a)} and {_shown(self.b)}"


def first_difference(a: pa.Table, b: pa.Table, columns: Sequence[str]) -> CellDifference | None:
    """Of two tables of equal length, in order of rows, then of these columns; None if all bits are
    the same.
    """
    found: CellDifference | None = None
    for name in columns:
        x, y = (_whole(table.column(name)) for table in (a, b))
        if found is not None:
            x, y = x.slice(0, found.row), y.slice(0, found.row)
        row = _first_row(x, y)
        if row is not None:
            found = _cell(name, x, y, row)
    return found


def told(key: Key) -> str:
    """A row's key in words."""
    position, sample, attempt = key
    return f"(position {position}, sample {sample}, attempt {attempt})"


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)


def _first_row(x: pa.Array, y: pa.Array) -> int | None:
    if len(x) == 0:
        return None
    if _is_list(x.type) and _is_list(y.type):
        return _first_list(x, y)
    return _first(_differ(x, y))


def _first_list(x: pa.Array, y: pa.Array) -> int | None:
    """The first row whose lists differ, in length or in an element."""
    lengths = [_lengths(array) for array in (x, y)]
    by_length = _first(lengths[0] != lengths[1])
    count = len(x) if by_length is None else by_length
    row = _first_row(x.slice(0, count).flatten(), y.slice(0, count).flatten())
    if row is None:
        return by_length
    ends = np.cumsum(np.maximum(lengths[0][:count], 0))
    return int(np.searchsorted(ends, row, side="right"))


def _differ(x: pa.Array, y: pa.Array) -> np.ndarray:
    """Boolean: which elements differ."""
    if pa.types.is_floating(x.type) and x.type == y.type:
        width = np.dtype(f"u{x.type.bit_width // 8}")
        bits = [_numbers(array).view(width) for array in (x, y)]
        null = [array.is_null().to_numpy(zero_copy_only=False) for array in (x, y)]
        return (null[0] != null[1]) | (~null[0] & (bits[0] != bits[1]))
    if pa.types.is_nested(x.type) or x.type != y.type:
        pairs = zip(x.to_pylist(), y.to_pylist(), strict=True)
        return np.array([repr(one) != repr(other) for one, other in pairs], dtype=bool)
    same = pc.call_function("equal", [x, y]).fill_null(False).to_numpy(zero_copy_only=False)
    null = [array.is_null().to_numpy(zero_copy_only=False) for array in (x, y)]
    return ~(same | (null[0] & null[1]))


def _lengths(lists: pa.Array) -> np.ndarray:
    """Of each list; -1 for none."""
    return pc.call_function("list_value_length", [lists]).fill_null(-1).to_numpy()


def _numbers(array: pa.Array) -> np.ndarray:
    """The elements as they are in memory; what stands for a null is of no account."""
    kind = array.type.to_pandas_dtype()
    if array.null_count == 0:
        return np.ascontiguousarray(array.to_numpy())
    data = np.frombuffer(array.buffers()[1], dtype=kind)
    return np.ascontiguousarray(data[array.offset : array.offset + len(array)])


def _first(different: np.ndarray) -> int | None:
    return int(different.argmax()) if different.any() else None


def _cell(column: str, x: pa.Array, y: pa.Array, row: int) -> CellDifference:
    if not (_is_list(x.type) and _is_list(y.type)) or not (x[row].is_valid and y[row].is_valid):
        return CellDifference(row=row, column=column, a=x[row].as_py(), b=y[row].as_py())
    one, other = x[row].values, y[row].values
    count = min(len(one), len(other))
    at = _first_row(one.slice(0, count), other.slice(0, count))
    if at is None:
        a, b = f"{len(one)} elements", f"{len(other)} elements"
        return CellDifference(row=row, column=column, a=a, b=b)
    return CellDifference(row=row, column=column, at=at, a=one[at].as_py(), b=other[at].as_py())


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _shown(value: Any) -> str:
    text = one_line(repr(value))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
