"""Which rows and columns of a block a request means; the same for every channel.

Owns: column names with a star, row subsets. Does not own: where the block lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dataflow.errors import DataError


def named(there: Sequence[str], columns: Sequence[str]) -> list[int]:
    """Indices of the columns asked for, all where none is named. Raises DataError."""
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


def picked(
    records: pa.RecordBatch, columns: Sequence[str], rows: np.ndarray | None
) -> pa.RecordBatch:
    """The rows and columns asked for. Raises DataError for a column that is not there."""
    if columns:
        records = records.select(named(records.schema.names, columns))
    return of_rows(records, rows)


def of_rows(records: pa.RecordBatch, rows: np.ndarray | None) -> pa.RecordBatch:
    """These rows, in this order: the same object where they are all, a view of neighbours."""
    if rows is None:
        return records
    if not neighbours(rows, records.num_rows):
        return records.take(pa.array(rows))
    return records if len(rows) == records.num_rows else records.slice(int(rows[0]), len(rows))


def neighbours(rows: np.ndarray, count: int) -> bool:
    """Whether these rows are there, one after another; not for none of some."""
    if not len(rows):
        return not count
    first = int(rows[0])
    if first < 0 or first + len(rows) > count or int(rows[-1]) - first != len(rows) - 1:
        return False
    return bool((rows == np.arange(first, first + len(rows), dtype=rows.dtype)).all())
