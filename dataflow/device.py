"""Columns declared `device`: flat torch tensors next to a record batch with only their lengths.

Owns: what such a column may be, taking and joining its rows, copying it to the host. Does not own:
the declaration (schema.py), which rows (batch.py), who keeps it and how it is sent
(engine/channels/tensors/columns.py).

Nothing here imports torch: tensors are used through their own methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.errors import DataError
from dataflow.ragged import Ragged
from dataflow.schema import Column, Schema

_OFFSET_BYTES = 8
"""Of an offset of a large list."""


def declared(schemas: Iterable[type[Schema]]) -> dict[str, Column]:
    """The device columns that these schemas declare."""
    return {c.name: c for schema in schemas for c in schema.columns.values() if c.device}


def is_tensor(data: Any) -> bool:
    """Whether this is a torch tensor, judged without torch."""
    return hasattr(data, "index_select") and hasattr(data, "detach")


def dtype_of(column: Column) -> str:
    """torch's name for the numbers of a device column, such as `float32`."""
    kind = column.type.value_type if pa.types.is_fixed_size_list(column.type) else column.type
    return np.dtype(kind.to_pandas_dtype()).name


def shape_of(column: Column) -> tuple[int, ...]:
    """The shape of one value: () for a number, (n,) for a vector."""
    return (column.type.list_size,) if pa.types.is_fixed_size_list(column.type) else ()


def as_declared(column: Column, data: Any, rows: int) -> Ragged:
    """The data given for a device column with this many rows, as Ragged; without an axis each
    length is 1.

    The tensor is detached, not copied, and must not be changed afterwards. Raises DataError if it
    is not a tensor, has another dtype or shape, or its offsets do not end with its values.
    """
    given = data if isinstance(data, Ragged) else Ragged(data, np.arange(rows + 1))
    where = f"column {column.name!r}, declared device"
    if not is_tensor(given.values):
        raise DataError(
            f"{where}: expected a torch tensor, found {type(given.values).__name__}. Fix:"
            " torch.from_numpy(values), or the column without device=True."
        )
    if isinstance(data, Ragged) != (column.axis is not None):
        wanted = "Ragged(tensor, offsets)" if column.axis is not None else "one tensor for all rows"
        raise DataError(f"{where}: expected {wanted}, found {type(data).__name__}. Fix: {wanted}.")
    require(where, column, given)
    return Ragged(given.values.detach().contiguous(), np.asarray(given.offsets, dtype=np.int64))


def require(where: str, column: Column, given: Ragged) -> None:
    """Raises DataError unless a tensor has its column's dtype and shape, and its offsets end with
    it.
    """
    found, shape = given.values, shape_of(column)
    expected, dtype = f"torch.{dtype_of(column)}", str(found.dtype)
    if dtype != expected:
        raise DataError(
            f"{where}: expected {expected}, found {dtype}. Fix: .to({expected}), or the type"
            " declared."
        )
    if tuple(found.shape[1:]) != shape or not found.dim():
        wanted = ", ".join(["values", *map(str, shape)])
        raise DataError(
            f"{where}: expected the shape [{wanted}], found {list(found.shape)}. Fix: .reshape(-1,"
            " ...)."
        )
    if column.axis is None and len(found) != len(given):
        raise DataError(
            f"{where}: expected a value for each of {len(given)} rows, found {len(found)}. Fix: one"
            " a row."
        )
    if len(found) != given.offsets[-1] or given.offsets[0] or (np.diff(given.offsets) < 0).any():
        raise DataError(
            f"{where}: expected offsets that ascend from 0 to its {len(found)} values, found"
            f" {given.offsets[0]} to {given.offsets[-1]}. Fix: Ragged(values, offsets) with row i"
            " at values[offsets[i]:offsets[i + 1]]."
        )


def lengths_array(given: Ragged, column: Column) -> pa.Array:
    """A device column in the record batch: a list of nulls with each row's length, or one null."""
    if column.axis is None:
        return pa.nulls(len(given))
    offsets, nothing = pa.array(given.offsets, pa.int64()), pa.nulls(int(given.offsets[-1]))
    return pa.LargeListArray.from_arrays(offsets, nothing, type=column.arrow.type)


def offsets_of(array: pa.Array) -> np.ndarray:
    """int64 [rows + 1], from 0: the inverse of `lengths_array`, for any slice of it."""
    if isinstance(array, pa.NullArray):
        return np.arange(len(array) + 1)
    if isinstance(array, pa.LargeListArray) and len(array):
        # `offsets.to_numpy()` takes three times as long.
        start, buffer = array.offset * _OFFSET_BYTES, array.buffers()[1]
        offsets = np.frombuffer(buffer, dtype=np.int64, count=len(array) + 1, offset=start)
    else:
        offsets = array.offsets.to_numpy()
    return offsets - offsets[0] if len(offsets) and offsets[0] else offsets


def taken(column: Ragged, rows: np.ndarray) -> Ragged:
    """These rows, in this order: a view if they are adjacent, else gathered on the device. Raises
    DataError for a row that is not there.
    """
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(column):
        raise DataError(
            f"expected rows below {len(column)}, found {int(rows.min())} to {int(rows.max())}"
        )
    starts, counts = column.offsets[:-1][rows], column.lengths[rows]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    if not len(rows) or (np.diff(rows) == 1).all():
        first = int(starts[0]) if len(rows) else 0
        return Ragged(column.values[first : first + int(offsets[-1])], offsets)
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    return Ragged(column.values[index], offsets)


def joined(parts: Sequence[Any]) -> Any:
    """The tensors of one column, concatenated on the first one's device."""
    if len(parts) == 1:
        return parts[0]
    found = parts[0].new_empty((sum(len(p) for p in parts), *parts[0].shape[1:]))
    at = 0
    for part in parts:
        found[at : at + len(part)] = part
        at += len(part)
    return found


def whole_array(given: Ragged, column_type: pa.DataType) -> pa.Array:
    """The column as Arrow with its values, copied to the host. column_type: its type in the record
    batch.
    """
    host = given.values.cpu().numpy()
    values = pa.array(host.reshape(-1))
    if host.ndim > 1:
        values = pa.FixedSizeListArray.from_arrays(values, host.shape[1])
    if pa.types.is_null(column_type):
        return values
    kind = pa.large_list(pa.field("item", values.type, nullable=False))
    return pa.LargeListArray.from_arrays(pa.array(given.offsets, pa.int64()), values, type=kind)


def first_not_finite(given: Ragged) -> int | None:
    """The first row of a device column with a non-finite value; None if there is none."""
    if not given.values.is_floating_point():
        return None
    wrong = ~given.values.isfinite()
    if not bool(wrong.any()):
        return None
    at = int(wrong.reshape(len(wrong), -1).any(1).nonzero()[0])
    return int(np.searchsorted(given.offsets, at, side="right")) - 1
