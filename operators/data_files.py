"""Users' data files: Parquet, JSONL, or a directory of either.

Owns: finding files and their split, their columns without reading the rows (for the check), reading
them as one Arrow table, and telling the shapes apart: TRL's columns and verl's Parquet. Does not
own: the order in which rows are drawn, and tokens (operators/kernels/data.py); procedural tasks
(operators/tasks.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from dataflow.errors import DataError, nearest
from dataflow.prompt_types import is_token_ids
from operators import tasks
from operators.data_lines import opened_for, place_of, read_lines, table_of

Shape = Literal["trl", "verl", "messages", "text", "pairs", "implicit"]
"""trl: `prompt` and dataset columns; verl: also `data_source` and `reward_model`; pairs: `prompt`,
`chosen` and `rejected`; implicit: whole `chosen` and `rejected`; others: no prompt.
"""

SUFFIXES = (".parquet", ".jsonl")
_ENDINGS = " or ".join(SUFFIXES)
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_OTHER_NAMES = ("question", "problem", "instruction", "query", "input", "text")
_PEEKED_LINES = 1000
_PROMPT = "'prompt' (text, a list of messages with role and content, or token ids)"


def columns_of(data: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a source, without its rows: from Parquet footers, or the first 1000 lines of
    JSONL.

    Raises DataError if there is no such file, or if it is empty or malformed.
    """
    if tasks.is_task(data):
        return tasks.task_columns(data)
    files = files_of(data, split)
    schema = (
        _parquet_schema(files)
        if _is_parquet(files)
        else table_of(read_lines(files[:1], _PEEKED_LINES)).schema
    )
    return {field.name: _plain(field.type) for field in schema}


def source_files(data: str, split: str | None = None) -> list[Path]:
    """A source's files, in order; none for a procedural task. Raises what columns_of raises."""
    return [] if tasks.is_task(data) else files_of(data, split)


def prompt_columns(data: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a source of prompts. Raises DataError like columns_of, and if there is no
    prompt.
    """
    columns = columns_of(data, split)
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
    or verl's `extra_info.split` in a file; train or test of a procedural task.

    Raises DataError, which for JSONL names the line.
    """
    if tasks.is_task(data):
        return tasks.task_table(data, split)
    files = files_of(data, split)
    table = _read_parquet(files) if _is_parquet(files) else table_of(read_lines(files))
    if split is not None and not Path(data).expanduser().is_dir():
        table = _rows_of_split(table, data, split)
    if not len(table):
        raise DataError(
            f"{data}: expected at least one row, found none. Fix: name a file that has rows."
        )
    return pa.table({name: _decoded(table.column(name)) for name in table.column_names})


def prompt_shape(name: str, columns: Mapping[str, pa.DataType]) -> Shape:
    """The shape of a source of prompts. Raises DataError, naming the columns, if there is none."""
    if "prompt" not in columns:
        raise DataError(_no_prompt(name, columns))
    if not is_prompt(columns["prompt"]):
        raise DataError(
            f"{name}: expected a column {_PROMPT}, found prompt: {columns['prompt']}. "
            'Fix: a string, or [{"role": "user", "content": "..."}].'
        )
    return "verl" if "reward_model" in columns and "data_source" in columns else "trl"


def demonstration_shape(name: str, columns: Mapping[str, pa.DataType]) -> Shape:
    """The shape of demonstrations: `prompt` with `completion`, or `messages`, or `text`."""
    if "prompt" in columns and "completion" in columns:
        if is_token_ids(columns["prompt"]) or is_token_ids(columns["completion"]):
            raise DataError(
                f"{name}: expected prompt and completion as text or as messages, found token ids."
                " Fix: the text; it is tokenised for the Model that is trained on it."
            )
        return prompt_shape(name, columns)
    if "messages" in columns and _is_messages(columns["messages"]):
        return "messages"
    if "text" in columns and _is_text(columns["text"]):
        return "text"
    raise DataError(
        f"{name}: expected columns 'prompt' and 'completion', or 'messages', or 'text', found:"
        f" {_listed(columns)}. Fix: rename the columns that hold the task and its answer to"
        " 'prompt' and 'completion'."
    )


def preference_shape(name: str, columns: Mapping[str, pa.DataType]) -> Shape:
    """The shape of preferences: `chosen` and `rejected`, with or without their `prompt`.

    Raises DataError if one of them is missing, or if they are not all text or all messages.
    """
    for wanted in ("chosen", "rejected"):
        if wanted not in columns:
            near = nearest(wanted, columns)
            fix = f"rename {near!r} to {wanted!r}" if near else f"a column {wanted!r}"
            raise DataError(
                f"{name}: expected columns 'chosen' and 'rejected', and 'prompt' unless both begin"
                f" with it, found columns: {_listed(columns)}. Fix: {fix}."
            )
    kinds = {n: columns[n] for n in ("prompt", "chosen", "rejected") if n in columns}
    if not (all(map(_is_text, kinds.values())) or all(map(_is_messages, kinds.values()))):
        shown = ", ".join(f"{n}: {kind}" for n, kind in kinds.items())
        raise DataError(
            f"{name}: expected {', '.join(kinds)} all as text or all as messages (role and"
            f" content), found {shown}. Fix: one form for all of them."
        )
    return "pairs" if "prompt" in columns else "implicit"


def is_prompt(kind: pa.DataType) -> bool:
    """Whether a column of this type can be a prompt: text, a list of messages, or token ids."""
    return _is_text(kind) or _is_messages(kind) or is_token_ids(kind)


def _no_prompt(name: str, columns: Mapping[str, pa.DataType]) -> str:
    near = nearest("prompt", columns) or next((c for c in _OTHER_NAMES if c in columns), None)
    fix = f"rename {near!r} to 'prompt'" if near else "a column 'prompt'"
    return f"{name}: expected a column {_PROMPT}, found columns: {_listed(columns)}. Fix: {fix}."


def _is_text(kind: pa.DataType) -> bool:
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_messages(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    item = kind.value_type
    return pa.types.is_struct(item) and {"role", "content"} <= {field.name for field in item}


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(columns) or "none"


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
        ".csv": "pandas.read_csv(...).to_parquet(...)",
        ".gz": "unpack it",
    }
    return known.get(suffix, "convert it, or name another file")


def _missing(path: Path) -> str:
    if not path.parent.is_dir():
        return f"{path}: no such file, nor is there a folder {path.parent}. Fix: check the path."
    names = sorted(p.name for p in path.parent.iterdir() if p.is_dir() or p.suffix in SUFFIXES)
    near = nearest(path.name, names)
    fix = f"{path.parent / near}" if near else f"one of those in {path.parent}: {_listed(names)}"
    return f"{path}: no such file. Fix: {fix}."


def _files_in(folder: Path, split: str | None) -> list[Path]:
    inside = folder / split if split is not None and (folder / split).is_dir() else folder
    found = _data_files(inside)
    chosen = found
    if split is not None and inside is folder:
        chosen = [p for p in found if _split_of(p, (split,))]
    if not chosen:
        what = "files" if split is None else f"files of split {split!r}"
        there = _listed(p.name for p in found)
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
        raise DataError(f"{folder}: expected Parquet or JSONL, found both. Fix: name one file.")
    splits = sorted({s for p in chosen if (s := _split_of(p, _SPLITS))})
    if split is None and len(splits) > 1:
        raise DataError(
            f"{folder}: holds the splits {_listed(splits)}, and none was chosen. Fix:"
            f" split={splits[0]!r}."
        )


def _split_of(path: Path, names: Sequence[str]) -> str | None:
    """The split that a file belongs to: train.parquet, train-00000-of-00004.parquet."""
    return next(
        (n for n in names if path.stem == n or path.stem.startswith((f"{n}-", f"{n}_", f"{n}."))),
        None,
    )


def _is_parquet(files: Sequence[Path]) -> bool:
    return files[0].suffix == ".parquet"


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
    if not tasks.is_task(data) and (path.is_dir() or split is None):
        files = files_of(data, split)
        if not _is_parquet(files):
            return place_of(files, row)
    return f"{data}: row {row}"


def _rows_of_split(table: pa.Table, data: str, split: str) -> pa.Table:
    """A single file's rows whose column `split`, or verl's `extra_info.split`, has this value."""
    of_row = _split_column(table)
    if of_row is None:
        raise DataError(
            f"{data}: expected 'split' or 'extra_info.split' to choose split {split!r} by, found"
            f" columns: {_listed(table.column_names)}. Fix: leave split= out, or name a folder with"
            " a file for each split."
        )
    chosen = table.filter(pa.array([value == split for value in of_row]))
    if not len(chosen):
        there = sorted({str(value) for value in of_row})
        raise DataError(
            f"{data}: no row of split {split!r}; there are: {_listed(there)}. Fix:"
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
