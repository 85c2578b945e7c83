"""Arrow's numbers as NumPy arrays, by their buffers.

Owns: this conversion. Does not own: any column. Arrow's own conversions import pandas where that is
installed, which takes as much memory as all that this server keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa


def values_of(array: pa.Array, kind: type[np.generic], null: float) -> np.ndarray:
    """The numbers, or truth as 0 and 1, of an array. null: what stands for one."""
    wide_type, wide_kind = (pa.float64(), np.float64) if _floats(array) else (pa.int64(), np.int64)
    values = _plain(
        array.cast(pa.uint8()).cast(wide_type) if _truth(array) else array.cast(wide_type),
        wide_kind,
    )
    if array.null_count:
        known = _plain(array.is_valid().cast(pa.uint8()), np.uint8) != 0
        return np.where(known, values, null).astype(kind)
    return values.astype(kind)


def _floats(array: pa.Array) -> bool:
    return pa.types.is_floating(array.type)


def _truth(array: pa.Array) -> bool:
    return pa.types.is_boolean(array.type)


def _plain(array: pa.Array, kind: type[np.generic]) -> np.ndarray:
    """An array's buffer of values."""
    buffer = array.buffers()[1]
    if buffer is None:
        return np.empty(0, kind)
    return np.frombuffer(buffer, kind, len(array) + array.offset)[array.offset :]


def whole_of(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        return pa.concat_arrays(combined.chunks)
    return combined


def row_numbers(rows: Sequence[int]) -> pa.Array:
    """int64, to take rows by."""
    numbers = np.array(rows, np.int64)
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])
