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


def declared_device_columns(schemas: Iterable[type[Schema]]) -> dict[str, Column]:
    """The device columns that these schemas declare, by name."""
    columns: dict[str, Column] = {}
    for schema in schemas:
        columns |= {column.name: column for column in schema.columns.values() if column.device}
    return columns


def is_tensor(thing: Any) -> bool:
    """Whether this is a torch tensor, judged without torch."""
    return hasattr(thing, "index_select") and hasattr(thing, "detach")


def dtype_of(column: Column) -> str:
    """torch's name for the numbers of a device column, such as `float32`."""
    kind = column.type.value_type if pa.types.is_fixed_size_list(column.type) else column.type
    return np.dtype(kind.to_pandas_dtype()).name


def shape_of(column: Column) -> tuple[int, ...]:
    """The shape of one value: () for a number, (n,) for a vector."""
    return (column.type.list_size,) if pa.types.is_fixed_size_list(column.type) else ()


def as_declared_column(column: Column, values: Any, rows: int) -> Ragged:
    """Return the values given for a device column with this many rows as Ragged; without an axis
    each length is 1.

    The tensor is detached, not copied, and must not be changed afterwards. Raises DataError if it
    is not a tensor, has another dtype or shape, or its offsets do not end with its values.
    """
    ragged = values if isinstance(values, Ragged) else Ragged(values, np.arange(rows + 1))
    where = f"column {column.name!r}, declared device"
    if not is_tensor(ragged.values):
        raise DataError(
            f"{where}: expected a torch tensor, found {type(ragged.values).__name__}. Fix:"
            " torch.from_numpy(values), or the column without device=True."
        )
    if isinstance(values, Ragged) != (column.axis is not None):
        form = "Ragged(tensor, offsets)" if column.axis is not None else "one tensor for all rows"
        raise DataError(f"{where}: expected {form}, found {type(values).__name__}. Fix: {form}.")
    require_declared_tensor(where, column, ragged)
    offsets = np.asarray(ragged.offsets, dtype=np.int64)
    return Ragged(ragged.values.detach().contiguous(), offsets)


def require_declared_tensor(where: str, column: Column, ragged: Ragged) -> None:
    """Raises DataError unless a tensor has its column's dtype and shape, and its offsets end with
    it.
    """
    tensor, offsets = ragged.values, ragged.offsets
    expected_dtype, dtype = f"torch.{dtype_of(column)}", str(tensor.dtype)
    if dtype != expected_dtype:
        raise DataError(
            f"{where}: expected {expected_dtype}, found {dtype}. Fix: .to({expected_dtype}), or the"
            " type declared."
        )
    shape = shape_of(column)
    if tuple(tensor.shape[1:]) != shape or not tensor.dim():
        expected_shape = ", ".join(["values", *map(str, shape)])
        raise DataError(
            f"{where}: expected the shape [{expected_shape}], found {list(tensor.shape)}. Fix:"
            " .reshape(-1, ...)."
        )
    if column.axis is None and len(tensor) != len(ragged):
        raise DataError(
            f"{where}: expected a value for each of {len(ragged)} rows, found {len(tensor)}. Fix:"
            " one a row."
        )
    descends = (np.diff(offsets) < 0).any()
    if len(tensor) != offsets[-1] or offsets[0] or descends:
        raise DataError(
            f"{where}: expected offsets that ascend from 0 to its {len(tensor)} values, found"
            f" {offsets[0]} to {offsets[-1]}. Fix: Ragged(values, offsets) with row i"
            " at values[offsets[i]:offsets[i + 1]]."
        )


def lengths_array(ragged: Ragged, column: Column) -> pa.Array:
    """What a record batch has of a device column: a list of nulls of each row's length, or without
    an axis one null a row.
    """
    if column.axis is None:
        return pa.nulls(len(ragged))
    offsets = pa.array(ragged.offsets, pa.int64())
    nulls = pa.nulls(int(ragged.offsets[-1]))
    return pa.LargeListArray.from_arrays(offsets, nulls, type=column.arrow.type)


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
    # Those of a slice are offsets into the whole array's values.
    return offsets - offsets[0] if len(offsets) and offsets[0] else offsets


def take_tensor_rows(column: Ragged, rows: np.ndarray) -> Ragged:
    """Take these rows, in this order: a view if they are adjacent, else gathered on the device.
    Raises DataError for a row that is not there.
    """
    if not len(rows):
        return Ragged(column.values[0:0], np.zeros(1, dtype=np.int64))
    lowest, highest = int(rows.min()), int(rows.max())
    if lowest < 0 or highest >= len(column):
        raise DataError(f"expected rows below {len(column)}, found {lowest} to {highest}")
    starts, counts = column.offsets[:-1][rows], column.lengths[rows]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    if (np.diff(rows) == 1).all():
        first = int(starts[0])
        return Ragged(column.values[first : first + int(offsets[-1])], offsets)
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    return Ragged(column.values[index], offsets)


def join_tensors(parts: Sequence[Any]) -> Any:
    """Concatenate the tensors of one column, on the first one's device."""
    if len(parts) == 1:
        return parts[0]
    total = sum(len(part) for part in parts)
    joined = parts[0].new_empty((total, *parts[0].shape[1:]))
    start = 0
    for part in parts:
        # The others may be on another device: an assignment copies from there, torch.cat does not.
        joined[start : start + len(part)] = part
        start += len(part)
    return joined


def whole_array(ragged: Ragged, column_type: pa.DataType) -> pa.Array:
    """Copy a device column with its values to the host, as Arrow. column_type: its type in the
    record batch.
    """
    host = ragged.values.cpu().numpy()
    values = pa.array(host.reshape(-1))
    if host.ndim > 1:
        values = pa.FixedSizeListArray.from_arrays(values, host.shape[1])
    if pa.types.is_null(column_type):  # without an axis: a value a row
        return values
    kind = pa.large_list(pa.field("item", values.type, nullable=False))
    return pa.LargeListArray.from_arrays(pa.array(ragged.offsets, pa.int64()), values, type=kind)


def first_not_finite(ragged: Ragged) -> int | None:
    """The first row of a device column with a non-finite value; None if there is none."""
    if not ragged.values.is_floating_point():
        return None
    is_wrong = ~ragged.values.isfinite()
    if not bool(is_wrong.any()):
        return None
    is_wrong_element = is_wrong.reshape(len(is_wrong), -1).any(1)
    index = int(is_wrong_element.nonzero()[0])
    return int(np.searchsorted(ragged.offsets, index, side="right")) - 1
