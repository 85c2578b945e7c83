"""Selecting the rows and columns of a block that a request names: `a/*`, row subsets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dataflow.arrays import all_true
from dataflow.errors import DataError


def column_indices(names: Sequence[str], columns: Sequence[str]) -> list[int]:
    """Indices of these columns, of all if none is named. Raises DataError for a missing one."""
    if not columns:
        return list(range(len(names)))
    indices: list[int] = []
    for name in columns:
        if name.endswith("/*"):
            indices += [i for i, n in enumerate(names) if n.startswith(name[:-1])]
        elif name in names:
            indices.append(names.index(name))
        else:
            raise DataError(f"no column {name!r}; there are: {', '.join(names)}")
    return indices


def select_records(
    records: pa.RecordBatch, columns: Sequence[str], rows: np.ndarray | None
) -> pa.RecordBatch:
    """These rows and columns. Raises DataError for a missing column."""
    if columns:
        records = records.select(column_indices(records.schema.names, columns))
    return select_rows(records, rows)


def select_rows(records: pa.RecordBatch, rows: np.ndarray | None) -> pa.RecordBatch:
    """These rows, in this order: `records` itself for all, a view of adjacent ones, else a copy."""
    if rows is None:
        return records
    if not neighbours(rows, records.num_rows):
        return records.take(pa.array(rows))
    if len(rows) == records.num_rows:
        return records
    return records.slice(int(rows[0]), len(rows))


def neighbours(rows: np.ndarray, count: int) -> bool:
    """Whether these are adjacent ascending rows of `count`; no rows only if there are none."""
    if not len(rows):
        return not count
    first = int(rows[0])
    if first < 0 or first + len(rows) > count or int(rows[-1]) - first != len(rows) - 1:
        return False
    return all_true(rows == np.arange(first, first + len(rows), dtype=rows.dtype))
