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
from operators.data_lines import make_table, read_lines, reading_file
from operators.data_shapes import list_names

_READ = 64 * 2**20
"""Most bytes of JSONL that are read to look for a split before the run does."""


def choose_rows_of_split(table: pa.Table, source: str, split: str) -> pa.Table:
    """Choose the rows of this split. Raises DataError if there are none."""
    split_column = _split_column(table)
    if split_column is None:
        raise _no_split_column(source, split, table.column_names)
    splits = split_column.to_pylist()
    rows = table.filter(pa.array([row_split == split for row_split in splits]))
    if not len(rows):
        raise _no_row(source, split, splits)
    return rows


def require_rows_of_split(path: Path, schema: pa.Schema, source: str, split: str) -> None:
    """Raise DataError if a file has no row of this split; of a file whose rows are too many to be
    read for that, if its first ones have no such column.
    """
    if path.suffix == ".jsonl" and path.stat().st_size > _READ:
        split_column = _split_column(schema.empty_table())
    else:
        split_column = _split_column(_read_splits(path, schema))
    if split_column is None:
        raise _no_split_column(source, split, schema.names)
    splits = split_column.unique().to_pylist()
    # Without any the file was too large to be read, or is damaged.
    if splits and split not in splits:
        raise _no_row(source, split, splits)


def _read_splits(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a file's rows; of Parquet only the columns that may say their split."""
    if path.suffix == ".csv":
        return read_csv([path])
    if path.suffix == ".jsonl":
        return make_table(read_lines([path]))
    name = "split" if "split" in schema.names else "extra_info.split"
    try:
        with reading_file(path):
            return pq.ParquetFile(path).read(columns=[name])
    except (pa.ArrowException, OSError):
        # The run says where it is damaged.
        return schema.empty_table()


def _split_column(table: pa.Table) -> pa.ChunkedArray | pa.Array | None:
    if "split" in table.column_names:
        return table.column("split")
    if "extra_info" not in table.column_names:
        return None
    column = table.column("extra_info")
    if not pa.types.is_struct(column.type) or column.type.get_field_index("split") < 0:
        return None
    infos = column.combine_chunks()
    if has_json_values(infos.type):
        return pa.array([row and row.get("split") for row in with_json_values(infos)])
    return infos.field("split")


def _no_split_column(source: str, split: str, names: Sequence[str]) -> DataError:
    return DataError(
        f"{source}: expected 'split' or 'extra_info.split' to choose split {split!r} by, found"
        f" columns: {list_names(names)}. Fix: leave split= out, or name a folder with"
        " a file for each split."
    )


def _no_row(source: str, split: str, splits: Sequence[Any]) -> DataError:
    names = sorted(set(map(str, splits)))
    return DataError(
        f"{source}: no row of split {split!r}; there are: {list_names(names)}. Fix:"
        f" split={names[0]!r}."
    )
