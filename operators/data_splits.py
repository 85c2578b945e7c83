"""The split of a row in a single file: its column `split`, or verl's `extra_info.split`.

Owns: choosing rows by it, and whether a split occurs. Does not own: splits that are files of a
folder (data_files.py), those of a task (tasks.py) or of the hub (data_hub.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dataflow.errors import DataError
from dataflow.prompt_types import has_json_values, with_json_values
from operators.data_csv import read_csv
from operators.data_lines import opened_for, read_lines, table_of
from operators.data_shapes import listed

_READ = 64 * 2**20
"""Most bytes of JSONL that are read to look for a split before the run does."""


def rows_of_split(table: pa.Table, data: str, split: str) -> pa.Table:
    """The rows of this split. Raises DataError if there are none."""
    of_row = _split_column(table)
    if of_row is None:
        raise _without_splits(data, split, table.column_names)
    values = of_row.to_pylist()
    chosen = table.filter(pa.array([value == split for value in values]))
    if not len(chosen):
        raise _no_row(data, split, values)
    return chosen


def require_split(path: Path, schema: pa.Schema, data: str, split: str) -> None:
    """Raises DataError if a file has no row of this split; of a file whose rows are too many to be
    read for that, if its first ones have no such column.
    """
    if path.suffix == ".jsonl" and path.stat().st_size > _READ:
        of_row = _split_column(schema.empty_table())
    else:
        of_row = _split_column(_table_with_splits(path, schema))
    if of_row is None:
        raise _without_splits(data, split, schema.names)
    values = of_row.unique().to_pylist()
    if values and split not in values:
        raise _no_row(data, split, values)


def _table_with_splits(path: Path, schema: pa.Schema) -> pa.Table:
    """A file's rows; of Parquet only the columns that may say their split."""
    if path.suffix == ".csv":
        return read_csv([path])
    if path.suffix == ".jsonl":
        return table_of(read_lines([path]))
    name = "split" if "split" in schema.names else "extra_info.split"
    try:
        with opened_for(path):
            return pq.ParquetFile(path).read(columns=[name])
    except (pa.ArrowException, OSError):  # the run says where it is damaged
        return schema.empty_table()


def _split_column(table: pa.Table) -> pa.ChunkedArray | pa.Array | None:
    if "split" in table.column_names:
        return table.column("split")
    info = table.column("extra_info") if "extra_info" in table.column_names else None
    if info is None or not pa.types.is_struct(info.type) or info.type.get_field_index("split") < 0:
        return None
    infos = info.combine_chunks()
    if has_json_values(infos.type):
        return pa.array([row and row.get("split") for row in with_json_values(infos)])
    return infos.field("split")


def _without_splits(data: str, split: str, names: Sequence[str]) -> DataError:
    return DataError(
        f"{data}: expected 'split' or 'extra_info.split' to choose split {split!r} by, found"
        f" columns: {listed(names)}. Fix: leave split= out, or name a folder with"
        " a file for each split."
    )


def _no_row(data: str, split: str, values: Sequence[Any]) -> DataError:
    there = sorted({str(value) for value in values})
    return DataError(
        f"{data}: no row of split {split!r}; there are: {listed(there)}. Fix: split={there[0]!r}."
    )
