"""Which rows and columns of a block a request means; the same for every channel.

Owns: column names with a star, row subsets. Does not own: where the block lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dataflow.errors import DataError


def named(there: Sequence[str], columns: Sequence[str]) -> list[int]:
    """The indices of the columns asked for, all where none is named. Raises DataError for one that is not there."""
    if not columns:
        return list(range(len(there)))
    found: list[int] = []
    for name in columns:
        if name.endswith("/*"):
            found += [i for i, n in enumerate(there) if n.startswith(name[:-1])]
        elif name in there:
            found.append(there.index(name))
        else:
            raise DataError(f"no column {name!r}; there are: {', '.join(there)}")
    return found


def picked(records: pa.RecordBatch, columns: Sequence[str], rows: np.ndarray | None) -> pa.RecordBatch:
    """The rows and columns asked for. Raises DataError for a column that is not there."""
    if columns:
        records = records.select(named(records.schema.names, columns))
    return of_rows(records, rows)


def of_rows(records: pa.RecordBatch, rows: np.ndarray | None) -> pa.RecordBatch:
    """These rows, in this order; the same object where they are all rows in order."""
    if rows is None or whole(rows, records.num_rows):
        return records
    return records.take(pa.array(rows))


def whole(rows: np.ndarray, count: int) -> bool:
    """Whether these are all rows, in order."""
    return len(rows) == count and bool((rows == np.arange(count, dtype=rows.dtype)).all())
