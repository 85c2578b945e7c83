"""Users' data files: Parquet, JSONL, CSV, or a directory of one of them.

Owns: finding files and their split, their columns without reading the rows (for the check), reading
them as one Arrow table. Does not own: the shapes (data_shapes.py), the order in which rows are
drawn, and tokens (operators/kernels/data.py); procedural tasks (operators/tasks.py) and data sets
of the hub (data_hub.py), which are read in its functions, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from dataflow.errors import DataError, nearest
from operators import tasks
from operators.data_csv import read_csv
from operators.data_hub import hub_columns, hub_digest, hub_table, is_hub
from operators.data_lines import opened_for, place_of, read_lines, table_of
from operators.data_messages import (
    columns_in_messages,
    columns_with_prompt,
    table_in_messages,
    table_with_prompt,
)
from operators.data_shapes import demonstration_shape, listed, preference_shape, prompt_shape

SUFFIXES = (".parquet", ".jsonl", ".csv")
_ENDINGS = ".parquet, .jsonl or .csv"
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_PEEKED_LINES = 1000


def columns_of(data: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a source: from Parquet footers, the first 1000 lines of JSONL, or all of a
    CSV, whose numbers only all of its rows can tell; a data set of the hub is loaded.

    Raises DataError if there is no such file, or if it is empty or malformed.
    """
    if tasks.is_task(data):
        return tasks.task_columns(data)
    if is_hub(data):
        found = hub_columns(data, split)
    else:
        found = {field.name: field.type for field in _schema_of(files_of(data, split))}
    _require_names(data, found)
    return columns_in_messages({name: _plain(kind) for name, kind in found.items()})


def _require_names(data: str, columns: Collection[str]) -> None:
    """Raises DataError for a column whose name is empty."""
    if "" in columns:
        others = listed(name for name in columns if name)
        problem = f"expected a name for each column, found an empty one beside {others}"
        raise DataError(f"{data}: {problem}. Fix: give it a name, or leave it out.")


def _schema_of(files: Sequence[Path]) -> pa.Schema:
    if _suffix(files) == ".parquet":
        return _parquet_schema(files)
    if _suffix(files) == ".csv":
        return read_csv(files).schema
    return table_of(read_lines(files[:1], _PEEKED_LINES)).schema


def source_files(data: str, split: str | None = None) -> list[Path | str]:
    """What a source reads: its files, in order, or the digest of the rows of a data set of the
    hub; nothing for a procedural task. Raises what columns_of raises.
    """
    if is_hub(data):
        return [hub_digest(data, split)]
    return [] if tasks.is_task(data) else [*files_of(data, split)]


def prompt_columns(data: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a source of prompts. Raises DataError like columns_of, and if there is no
    prompt.
    """
    columns = columns_with_prompt(columns_of(data, split))
    prompt_shape(data, columns)
    return columns


def demonstration_columns(data: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a source of demonstrations. Raises DataError like columns_of, and if there are
    none.
    """
    columns = columns_of(data, split)
    demonstration_shape(data, columns)
    return columns


def preference_columns(data: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a source of preferences. Raises DataError like columns_of, and if there are
    none.
    """
    columns = columns_of(data, split)
    preference_shape(data, columns)
    return columns


def read_table(data: str, split: str | None = None) -> pa.Table:
    """All rows of a source. split: a file or folder of that name in a directory; the column `split`
    or verl's `extra_info.split` in a file; train or test of a procedural task; a split of the hub's
    data set, as `datasets` reads it.

    Raises DataError, which for JSONL names the line.
    """
    if tasks.is_task(data):
        return tasks.task_table(data, split)
    table = hub_table(data, split) if is_hub(data) else _read_files(data, split)
    if not len(table):
        raise DataError(
            f"{data}: expected at least one row, found none. Fix: name a file that has rows."
        )
    _require_names(data, table.column_names)
    plain = pa.table({name: _decoded(table.column(name)) for name in table.column_names})
    return table_in_messages(plain, lambda row: row_place(data, split, row))


def read_prompts(data: str, split: str | None = None) -> pa.Table:
    """All rows of a source of prompts: `messages` without `prompt` get one. Raises what read_table
    raises.
    """
    return table_with_prompt(read_table(data, split))


def _read_files(data: str, split: str | None) -> pa.Table:
    files = files_of(data, split)
    if _suffix(files) == ".parquet":
        table = _read_parquet(files)
    else:
        table = read_csv(files) if _suffix(files) == ".csv" else table_of(read_lines(files))
    if split is not None and not Path(data).expanduser().is_dir():
        table = _rows_of_split(table, data, split)
    return table


def files_of(data: str, split: str | None) -> list[Path]:
    """The files that a source reads. Raises DataError if there are none, or if it is ambiguous."""
    path = Path(data).expanduser()
    with opened_for(path):
        if path.is_dir():
            return _files_in(path, split)
        _refuse_other_than_file(path)
    if path.suffix not in SUFFIXES:
        found = repr(path.suffix) if path.suffix else "no ending"
        raise DataError(
            f"{path}: expected a file ending in {_ENDINGS}, found {found}. Fix:"
            f" {_conversion(path.suffix)}."
        )
    if not path.stat().st_size:
        raise DataError(
            f"{path}: expected at least one row, found an empty file. Fix: name a file that has"
            " rows."
        )
    return [path]


def _refuse_other_than_file(path: Path) -> None:
    """Raises DataError for what does not exist, and for what has no end or no rows: a pipe, a
    device, a socket.
    """
    if path.is_file():
        return
    if path.is_symlink():
        raise DataError(
            f"{path}: a link to {path.readlink()}, which is not there. Fix: mend the link."
        )
    if path.exists():
        raise DataError(
            f"{path}: expected a file or a folder, found {_kind(path)}. Fix: name a file."
        )
    raise DataError(_missing(path))


def _kind(path: Path) -> str:
    kinds = {"a pipe": path.is_fifo, "a socket": path.is_socket, "a device": path.is_char_device}
    return next((name for name, holds in kinds.items() if holds()), "a device")


def _conversion(suffix: str) -> str:
    known = {
        ".json": "one object a line, as .jsonl",
        ".tsv": "save it with commas, as .csv",
        ".gz": "unpack it",
    }
    return known.get(suffix, "convert it, or name another file")


def _missing(path: Path) -> str:
    if not path.parent.is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.suffix:
        return f"{path}: no such file. Fix: hf:{path}, if it is a data set of the hub."
    if not path.parent.is_dir():
        return f"{path}: no such file, nor is there a folder {path.parent}. Fix: check the path."
    names = sorted(p.name for p in path.parent.iterdir() if p.is_dir() or p.suffix in SUFFIXES)
    near = nearest(path.name, names)
    fix = f"{path.parent / near}" if near else f"one of those in {path.parent}: {listed(names)}"
    return f"{path}: no such file. Fix: {fix}."


def _files_in(folder: Path, split: str | None) -> list[Path]:
    inside = folder / split if split is not None and (folder / split).is_dir() else folder
    found = _data_files(inside)
    chosen = found
    if split is not None and inside is folder:
        chosen = [p for p in found if _split_of(p, (split,))]
    if not chosen:
        what = "files" if split is None else f"files of split {split!r}"
        there = listed(p.name for p in found)
        fix = "the folder that has the files, or one of them"
        raise DataError(
            f"{folder}: expected {what} ending in {_ENDINGS}, found: {there}. Fix: {fix}."
        )
    _require_one_kind(folder, chosen, split)
    return chosen


def _data_files(folder: Path) -> list[Path]:
    named = sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES)
    for path in named:
        if not path.is_dir():
            _refuse_other_than_file(path)
    return [p for p in named if p.is_file() and (p.suffix == ".parquet" or p.stat().st_size)]


def _require_one_kind(folder: Path, chosen: Sequence[Path], split: str | None) -> None:
    """Raises DataError for files of both formats, and for several splits if none was chosen."""
    if len({p.suffix for p in chosen}) > 1:
        found = listed(sorted({p.suffix for p in chosen}))
        raise DataError(
            f"{folder}: expected files of one format, found {found}. Fix: name one file."
        )
    splits = sorted({s for p in chosen if (s := _split_of(p, _SPLITS))})
    if split is None and len(splits) > 1:
        raise DataError(
            f"{folder}: holds the splits {listed(splits)}, and none was chosen. Fix:"
            f" split={splits[0]!r}."
        )


def _split_of(path: Path, names: Sequence[str]) -> str | None:
    """The split that a file belongs to: train.parquet, train-00000-of-00004.parquet."""
    return next(
        (n for n in names if path.stem == n or path.stem.startswith((f"{n}-", f"{n}_", f"{n}."))),
        None,
    )


def _suffix(files: Sequence[Path]) -> str:
    return files[0].suffix


def _parquet_schema(files: Sequence[Path]) -> pa.Schema:
    schemas = []
    for path in files:
        try:
            with opened_for(path):
                schemas.append(pq.read_schema(path).remove_metadata())
        except (pa.ArrowException, DataError) as error:
            told = _first_line(error).partition(". Fix")[0]
            raise DataError(
                f"{path}: expected a Parquet file: {told}. Fix: write it again."
            ) from error
        names = schemas[-1].names
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(
                f"{path}: expected each column once, found {repeated[0]!r} twice. Fix: rename one."
            )
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(_differing(files, schemas, error)) from error


def _differing(files: Sequence[Path], schemas: Sequence[pa.Schema], error: Exception) -> str:
    """Name the first file that does not match those before it."""
    for count in range(2, len(schemas) + 1):
        try:
            pa.unify_schemas(schemas[:count], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            return (
                f"{files[count - 1]}: expected the column types of {files[0].name}: {error}. Fix:"
                " one type a column."
            )
    return (
        f"{files[0].parent}: expected files with the same columns: {error}. Fix: one type for each"
        " column."
    )


def _read_parquet(files: Sequence[Path]) -> pa.Table:
    schema = _parquet_schema(files)
    try:
        found = ds.dataset([str(p) for p in files], format="parquet", schema=schema).to_table()
        found.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(_damaged(files, error)) from error
    return found


def _damaged(files: Sequence[Path], error: Exception) -> str:
    """Name the file that cannot be read, and for invalid UTF-8 its row and column."""
    for path in files:
        try:
            table = pq.ParquetFile(path).read()
        except (pa.ArrowException, OSError) as found:
            return (
                f"{path}: could not be read: {_first_line(found)}. Fix: write it again, it is"
                " damaged."
            )
        for name in table.column_names:
            row = _first_invalid(table.column(name))
            if row is not None:
                return (
                    f"{path}: row {row}, column {name!r}: expected UTF-8, found other bytes. Fix:"
                    " write it again."
                )
    return f"{files[0]}: could not be read: {_first_line(error)}. Fix: write it again."


def _first_line(error: Exception) -> str:
    """Arrow's message, without the file's bytes that it may repeat."""
    line = str(error).partition("\n")[0].rstrip(".")
    return "".join(c if c.isprintable() else "?" for c in line)


def _first_invalid(column: pa.ChunkedArray) -> int | None:
    """The first row whose value is not valid, by bisection."""
    start = 0
    for chunk in column.chunks:
        if not _is_valid(chunk):
            low, high = 0, len(chunk)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (
                    (low, middle)
                    if not _is_valid(chunk.slice(low, middle - low))
                    else (middle, high)
                )
            return start + low
        start += len(chunk)
    return None


def _is_valid(values: pa.Array) -> bool:
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def row_place(data: str, split: str | None, row: int) -> str:
    """The place of a row of `read_table`: `file:line` for JSONL, else `row N`."""
    path = Path(data).expanduser()
    if not (tasks.is_task(data) or is_hub(data)) and (path.is_dir() or split is None):
        files = files_of(data, split)
        if _suffix(files) == ".jsonl":
            return place_of(files, row)
    return f"{data}: row {row}"


def _rows_of_split(table: pa.Table, data: str, split: str) -> pa.Table:
    """A single file's rows whose column `split`, or verl's `extra_info.split`, has this value."""
    of_row = _split_column(table)
    if of_row is None:
        raise DataError(
            f"{data}: expected 'split' or 'extra_info.split' to choose split {split!r} by, found"
            f" columns: {listed(table.column_names)}. Fix: leave split= out, or name a folder with"
            " a file for each split."
        )
    chosen = table.filter(pa.array([value == split for value in of_row]))
    if not len(chosen):
        there = sorted({str(value) for value in of_row})
        raise DataError(
            f"{data}: no row of split {split!r}; there are: {listed(there)}. Fix:"
            f" split={there[0]!r}."
        )
    return chosen


def _split_column(table: pa.Table) -> list[Any] | None:
    if "split" in table.column_names:
        return table.column("split").to_pylist()
    info = table.column("extra_info") if "extra_info" in table.column_names else None
    if info is None or not pa.types.is_struct(info.type) or info.type.get_field_index("split") < 0:
        return None
    return info.combine_chunks().field("split").to_pylist()


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _decoded(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dictionaries do not travel on edges."""
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values
