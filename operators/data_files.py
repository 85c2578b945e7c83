"""Users' data files: Parquet, JSONL, CSV, or a directory of one of them.

Owns: finding files and their split, their columns without reading the rows (for the check), reading
them as one Arrow table. Does not own: the shapes (data_shapes.py), the order in which rows are
drawn, and tokens (operators/kernels/data.py); procedural tasks (operators/tasks.py) and data sets
of the hub (data_hub.py), which are read in its functions, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from dataflow.errors import DataError, nearest
from operators import tasks
from operators.data_csv import read_csv
from operators.data_hub import digest_hub_rows, is_hub, read_hub_columns, read_hub_table
from operators.data_lines import locate_line, make_table, read_lines, reading_file
from operators.data_messages import (
    columns_in_messages,
    columns_with_prompt,
    table_in_messages,
    table_with_prompt,
)
from operators.data_parts import COLUMNS, has_parts, refuse_other_parts_in
from operators.data_shapes import demonstration_shape, list_names, preference_shape, prompt_shape
from operators.data_splits import choose_rows_of_split, require_rows_of_split

SUFFIXES = (".parquet", ".jsonl", ".csv")
_ENDINGS = ".parquet, .jsonl or .csv"
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_PEEKED_LINES = 1000


def source_columns(source: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a source: from Parquet footers, the first 1000 lines of JSONL, or all of a
    CSV, whose numbers only all of its rows can tell; a data set of the hub is loaded.

    Raises DataError if there is no such file, or if it is empty or malformed, and if it has no row
    of the split.
    """
    if tasks.is_task(source):
        tasks.require_task_split(source, split)
        return tasks.task_columns(source)
    if is_hub(source):
        columns = read_hub_columns(source, split)
    else:
        columns = _read_columns_of_files(source, split)
    _refuse_nameless(source, columns)
    columns_in_parts = [name for name in COLUMNS if name in columns and has_parts(columns[name])]
    if columns_in_parts:
        _refuse_other_parts(source, split, columns_in_parts)
    return columns_in_messages({name: _plain_type(kind) for name, kind in columns.items()})


def _refuse_other_parts(source: str, split: str | None, names: Sequence[str]) -> None:
    """Raise DataError for a part of a message that is no text."""
    if is_hub(source):
        columns = read_hub_table(source, split).select(names)
        table_in_messages(columns, partial(row_place, source, split))
        return
    # Columns of other files were read with the text of their parts.
    files = find_files(source, split)
    if _suffix(files) == ".parquet":
        for name in names:
            refuse_other_parts_in(files, name)


def _refuse_nameless(source: str, columns: Collection[str]) -> None:
    if "" in columns:
        names = list_names(name for name in columns if name)
        raise DataError(
            f"{source}: expected a name for each column, found an empty one beside {names}. Fix:"
            " give it a name, or leave it out."
        )


def _read_columns_of_files(source: str, split: str | None) -> dict[str, pa.DataType]:
    files = find_files(source, split)
    schema = _read_schema(files)
    if split is not None and not Path(source).expanduser().is_dir():
        require_rows_of_split(files[0], schema, source, split)
    return {field.name: field.type for field in schema}


def _read_schema(files: Sequence[Path]) -> pa.Schema:
    if _suffix(files) == ".parquet":
        return _read_parquet_schema(files)
    if _suffix(files) == ".csv":
        return read_csv(files).schema
    return make_table(read_lines(files[:1], _PEEKED_LINES)).schema


def source_files(source: str, split: str | None = None) -> list[Path | str]:
    """What a source reads: its files, in order, or the digest of the rows of a data set of the
    hub; nothing for a procedural task. Raises what source_columns raises.
    """
    if is_hub(source):
        return [digest_hub_rows(source, split)]
    if tasks.is_task(source):
        return []
    return [*find_files(source, split)]


def prompt_columns(source: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a source of prompts. Raises DataError like source_columns, and if there is
    no prompt.
    """
    columns = columns_with_prompt(source_columns(source, split))
    prompt_shape(source, columns)
    return columns


def demonstration_columns(source: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a source of demonstrations. Raises DataError like source_columns, and if
    there are none.
    """
    columns = source_columns(source, split)
    demonstration_shape(source, columns)
    return columns


def preference_columns(source: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a source of preferences. Raises DataError like source_columns, and if there
    are none.
    """
    columns = source_columns(source, split)
    preference_shape(source, columns)
    return columns


def read_table(source: str, split: str | None = None) -> pa.Table:
    """Read all rows of a source. split: a file or folder of that name in a directory; the column
    `split` or verl's `extra_info.split` in a file; train or test of a procedural task; a split of
    the hub's data set, as `datasets` reads it.

    Raises DataError, which for JSONL names the line.
    """
    if tasks.is_task(source):
        return tasks.task_table(source, split)
    if is_hub(source):
        table = read_hub_table(source, split)
    else:
        table = _read_files(source, split)
    if not len(table):
        raise DataError(
            f"{source}: expected at least one row, found none. Fix: name a file that has rows."
        )
    _refuse_nameless(source, table.column_names)
    plain = pa.table({name: _decode(table.column(name)) for name in table.column_names})
    return table_in_messages(plain, partial(row_place, source, split))


def read_prompts(source: str, split: str | None = None) -> pa.Table:
    """Read all rows of a source of prompts: `messages` without `prompt` get one. Raises what
    read_table raises.
    """
    return table_with_prompt(read_table(source, split))


def _read_files(source: str, split: str | None) -> pa.Table:
    files = find_files(source, split)
    if _suffix(files) == ".parquet":
        table = _read_parquet(files)
    elif _suffix(files) == ".csv":
        table = read_csv(files)
    else:
        table = make_table(read_lines(files))
    if split is not None and not Path(source).expanduser().is_dir():
        table = choose_rows_of_split(table, source, split)
    return table


def find_files(source: str, split: str | None) -> list[Path]:
    """Find the files that a source reads. Raises DataError if there are none, or if it is
    ambiguous.
    """
    path = Path(source).expanduser()
    with reading_file(path):
        if path.is_dir():
            return _choose_files(path, split)
        _refuse_other_than_file(path)
    if path.suffix not in SUFFIXES:
        ending = repr(path.suffix) if path.suffix else "no ending"
        raise DataError(
            f"{path}: expected a file ending in {_ENDINGS}, found {ending}. Fix:"
            f" {_suggest_conversion(path.suffix)}."
        )
    if not path.stat().st_size:
        raise DataError(
            f"{path}: expected at least one row, found an empty file. Fix: name a file that has"
            " rows."
        )
    return [path]


def _refuse_other_than_file(path: Path) -> None:
    """Raise DataError for what does not exist, and for what has no end or no rows: a pipe, a
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
            f"{path}: expected a file or a folder, found {_name_kind(path)}. Fix: name a file."
        )
    raise DataError(_describe_missing(path))


def _name_kind(path: Path) -> str:
    if path.is_fifo():
        return "a pipe"
    if path.is_socket():
        return "a socket"
    return "a device"


def _suggest_conversion(suffix: str) -> str:
    conversions = {
        ".json": "one object a line, as .jsonl",
        ".tsv": "save it with commas, as .csv",
        ".gz": "unpack it",
    }
    return conversions.get(suffix, "convert it, or name another file")


def _describe_missing(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.suffix:
            return f"{path}: no such file. Fix: hf:{path}, if it is a data set of the hub."
        return f"{path}: no such file, nor is there a folder {folder}. Fix: check the path."
    candidates = (p for p in folder.iterdir() if p.is_dir() or p.suffix in SUFFIXES)
    names = sorted(candidate.name for candidate in candidates)
    near = nearest(path.name, names)
    if near:
        fix = f"{folder / near}"
    else:
        fix = f"one of those in {folder}: {list_names(names)}"
    return f"{path}: no such file. Fix: {fix}."


def _choose_files(folder: Path, split: str | None) -> list[Path]:
    """The files of a split: those of a folder of its name, else those whose names begin with it."""
    if split is not None and (folder / split).is_dir():
        files = chosen_files = _list_data_files(folder / split)
    else:
        files = chosen_files = _list_data_files(folder)
        if split is not None:
            chosen_files = [path for path in files if _split_of(path, (split,))]
    if not chosen_files:
        what = "files" if split is None else f"files of split {split!r}"
        names = list_names(path.name for path in files)
        fix = "the folder that has the files, or one of them"
        raise DataError(
            f"{folder}: expected {what} ending in {_ENDINGS}, found: {names}. Fix: {fix}."
        )
    _require_one_kind(folder, chosen_files, split)
    return chosen_files


def _list_data_files(folder: Path) -> list[Path]:
    """The files of a folder that may have rows: without empty ones of text."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    for path in paths:
        if not path.is_dir():
            _refuse_other_than_file(path)
    files = (path for path in paths if path.is_file())
    return [path for path in files if path.suffix == ".parquet" or path.stat().st_size]


def _require_one_kind(folder: Path, files: Sequence[Path], split: str | None) -> None:
    """Raise DataError for files of both formats, and for several splits if none was chosen."""
    suffixes = sorted({path.suffix for path in files})
    if len(suffixes) > 1:
        raise DataError(
            f"{folder}: expected files of one format, found {list_names(suffixes)}. Fix: name one"
            " file."
        )
    file_splits = {_split_of(path, _SPLITS) for path in files}
    splits = sorted(filter(None, file_splits))
    if split is None and len(splits) > 1:
        raise DataError(
            f"{folder}: holds the splits {list_names(splits)}, and none was chosen. Fix:"
            f" split={splits[0]!r}."
        )


def _split_of(path: Path, splits: Sequence[str]) -> str | None:
    """The split that a file belongs to: train.parquet, train-00000-of-00004.parquet."""
    for split in splits:
        beginnings = (f"{split}-", f"{split}_", f"{split}.")
        if path.stem == split or path.stem.startswith(beginnings):
            return split
    return None


def _suffix(files: Sequence[Path]) -> str:
    return files[0].suffix


def _read_parquet_schema(files: Sequence[Path]) -> pa.Schema:
    schemas = [_read_footer(path) for path in files]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(_describe_difference(files, schemas, error)) from error


def _read_footer(path: Path) -> pa.Schema:
    try:
        with reading_file(path):
            schema = pq.read_schema(path).remove_metadata()
    except (pa.ArrowException, DataError) as error:
        problem = _first_line(error).partition(". Fix")[0]
        raise DataError(
            f"{path}: expected a Parquet file: {problem}. Fix: write it again."
        ) from error
    repeated = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if repeated:
        raise DataError(
            f"{path}: expected each column once, found {repeated[0]!r} twice. Fix: rename one."
        )
    return schema


def _describe_difference(
    files: Sequence[Path], schemas: Sequence[pa.Schema], error: Exception
) -> str:
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
    schema = _read_parquet_schema(files)
    paths = [str(path) for path in files]
    try:
        table = ds.dataset(paths, format="parquet", schema=schema).to_table()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(_describe_damage(files, error)) from error
    return table


def _describe_damage(files: Sequence[Path], error: Exception) -> str:
    """Name the file that cannot be read, and for invalid UTF-8 its row and column."""
    for path in files:
        try:
            table = pq.ParquetFile(path).read()
        except (pa.ArrowException, OSError) as file_error:
            return (
                f"{path}: could not be read: {_first_line(file_error)}. Fix: write it again, it is"
                " damaged."
            )
        for name in table.column_names:
            row = _find_invalid(table.column(name))
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


def _find_invalid(column: pa.ChunkedArray) -> int | None:
    """Find the first row whose value is not valid, by bisection."""
    start = 0
    for chunk in column.chunks:
        if not _is_valid(chunk):
            return start + _find_invalid_in(chunk)
        start += len(chunk)
    return None


def _find_invalid_in(chunk: pa.Array) -> int:
    low, high = 0, len(chunk)
    while high - low > 1:
        middle = (low + high) // 2
        if _is_valid(chunk.slice(low, middle - low)):
            low = middle
        else:
            high = middle
    return low


def _is_valid(values: pa.Array) -> bool:
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def row_place(source: str, split: str | None, row: int) -> str:
    """The place of a row of `read_table`: `file:line` for JSONL, else `row N`."""
    where = f"{source}: row {row}"
    if tasks.is_task(source) or is_hub(source):
        return where
    # Of a split that is part of a file the row is not counted from the file's first line.
    if split is not None and not Path(source).expanduser().is_dir():
        return where
    files = find_files(source, split)
    if _suffix(files) != ".jsonl":
        return where
    return locate_line(files, row)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column after `_decode`."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _decode(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Write out a dictionary's values: dictionaries do not travel on edges."""
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    return column
