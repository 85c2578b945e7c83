"""Data files as users bring them: Parquet, JSONL, or a directory of either.

Owns: finding files and their split, their columns without reading the rows (for the check), reading them as one Arrow
table, and telling the shapes apart: TRL's columns and verl's Parquet. Does not own: in which order rows are drawn, and
tokens (operators/kernels/data.py); procedural tasks (operators/tasks.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from dataflow.errors import DataError, nearest
from operators import tasks

Shape = Literal["trl", "verl", "messages", "text"]
"""trl: `prompt` and dataset columns; verl: the same with `data_source` and `reward_model`; others: no prompt."""

SUFFIXES = (".parquet", ".jsonl")
_ENDINGS = " or ".join(SUFFIXES)
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_OTHER_NAMES = ("question", "problem", "instruction", "query", "input", "text")
_PEEKED_LINES = 1000
_PROMPT = "'prompt' (text, or a list of messages with role and content)"

Line = tuple[Path, int, dict[str, Any]]
"""File, line number from 1, and the JSON object on it."""


def columns_of(data: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a source without its rows: Parquet footers, or the first 1000 lines of a JSONL file.

    Raises DataError where there is no such file, where it is empty or where it is not of its format.
    """
    if tasks.is_task(data):
        return tasks.task_columns(data)
    files = files_of(data, split)
    schema = _parquet_schema(files) if _is_parquet(files) else _table(_lines(files[:1], _PEEKED_LINES)).schema
    return {field.name: _plain(field.type) for field in schema}


def source_files(data: str, split: str | None = None) -> list[Path]:
    """The files behind a source, in order; none for a procedural task. Raises DataError as columns_of does."""
    return [] if tasks.is_task(data) else files_of(data, split)


def prompt_columns(data: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a source of prompts. Raises DataError as columns_of does, and where there is no prompt."""
    columns = columns_of(data, split)
    prompt_shape(data, columns)
    return columns


def demonstration_columns(data: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a source of demonstrations. Raises DataError as columns_of does, and where there are none."""
    columns = columns_of(data, split)
    demonstration_shape(data, columns)
    return columns


def read_table(data: str, split: str | None = None) -> pa.Table:
    """All rows of a source. split: a file or folder of that name inside a directory, the column `split` or verl's
    `extra_info.split` inside a file, train or test of a procedural task.

    Raises DataError; for JSONL it names the line.
    """
    if tasks.is_task(data):
        return tasks.task_table(data, split)
    files = files_of(data, split)
    table = _read_parquet(files) if _is_parquet(files) else _table(_lines(files))
    if split is not None and not Path(data).expanduser().is_dir():
        table = _rows_of_split(table, data, split)
    if not len(table):
        raise DataError(f"{data}: expected at least one row, found none. Fix: name a file that has rows.")
    return pa.table({name: _decoded(table.column(name)) for name in table.column_names})


def prompt_shape(name: str, columns: Mapping[str, pa.DataType]) -> Shape:
    """The shape of a source of prompts. Raises DataError, naming the columns found, where there is no prompt."""
    if "prompt" not in columns:
        raise DataError(_no_prompt(name, columns))
    if not is_prompt(columns["prompt"]):
        raise DataError(
            f"{name}: expected a column {_PROMPT}, found prompt: {columns['prompt']}. "
            'Fix: a string, or [{"role": "user", "content": "..."}].'
        )
    return "verl" if "reward_model" in columns and "data_source" in columns else "trl"


def demonstration_shape(name: str, columns: Mapping[str, pa.DataType]) -> Shape:
    """The shape of a source of demonstrations: `prompt` with `completion`, or `messages`, or `text`."""
    if "prompt" in columns and "completion" in columns:
        return prompt_shape(name, columns)
    if "messages" in columns and _is_messages(columns["messages"]):
        return "messages"
    if "text" in columns and _is_text(columns["text"]):
        return "text"
    raise DataError(
        f"{name}: expected columns 'prompt' and 'completion', or 'messages', or 'text', found: {_listed(columns)}. "
        "Fix: rename the columns that hold the task and its answer to 'prompt' and 'completion'."
    )


def is_prompt(kind: pa.DataType) -> bool:
    """Whether a column of this type can be a prompt: text, or a list of messages."""
    return _is_text(kind) or _is_messages(kind)


def _no_prompt(name: str, columns: Mapping[str, pa.DataType]) -> str:
    near = nearest("prompt", columns) or next((c for c in _OTHER_NAMES if c in columns), None)
    fix = f"rename {near!r} to 'prompt'" if near else "a column 'prompt'"
    return f"{name}: expected a column {_PROMPT}, found columns: {_listed(columns)}. Fix: {fix}."


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_messages(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    item = kind.value_type
    return pa.types.is_struct(item) and {"role", "content"} <= {field.name for field in item}


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(columns) or "none"


# Finding files


def files_of(data: str, split: str | None) -> list[Path]:
    """The files that a source reads. Raises DataError where there is none, or where it is not clear which."""
    path = Path(data).expanduser()
    if path.is_dir():
        return _files_in(path, split)
    if not path.is_file():
        raise DataError(_missing(path))
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: expected a file ending in {_ENDINGS}, found {path.suffix or 'no ending'!r}.")
    if not path.stat().st_size:
        raise DataError(f"{path}: expected at least one row, found an empty file. Fix: name a file that has rows.")
    return [path]


def _missing(path: Path) -> str:
    if not path.parent.is_dir():
        return f"{path}: no such file, nor is there a folder {path.parent}. Fix: check the path."
    names = sorted(p.name for p in path.parent.iterdir() if p.is_dir() or p.suffix in SUFFIXES)
    near = nearest(path.name, names)
    fix = f"{path.parent / near}" if near else f"one of those in {path.parent}: {_listed(names)}"
    return f"{path}: no such file. Fix: {fix}."


def _files_in(folder: Path, split: str | None) -> list[Path]:
    inside = folder / split if split is not None and (folder / split).is_dir() else folder
    found = sorted(p for p in inside.iterdir() if p.suffix in SUFFIXES and p.is_file() and p.stat().st_size)
    chosen = found if split is None or inside is not folder else [p for p in found if _split_of(p, (split,))]
    if not chosen:
        what = "files" if split is None else f"files of split {split!r}"
        raise DataError(f"{folder}: expected {what} ending in {_ENDINGS}, found: {_listed(p.name for p in found)}.")
    if len({p.suffix for p in chosen}) > 1:
        raise DataError(f"{folder}: expected Parquet or JSONL, found both. Fix: name one file.")
    splits = sorted({s for p in chosen if (s := _split_of(p, _SPLITS))})
    if split is None and len(splits) > 1:
        raise DataError(f"{folder}: holds the splits {_listed(splits)}, and none was chosen. Fix: split={splits[0]!r}.")
    return chosen


def _split_of(path: Path, names: Sequence[str]) -> str | None:
    """Which of these splits a file belongs to: train.parquet, train-00000-of-00004.parquet."""
    return next((n for n in names if path.stem == n or path.stem.startswith((f"{n}-", f"{n}_", f"{n}."))), None)


def _is_parquet(files: Sequence[Path]) -> bool:
    return files[0].suffix == ".parquet"


# Parquet


def _parquet_schema(files: Sequence[Path]) -> pa.Schema:
    schemas = []
    for path in files:
        try:
            schemas.append(pq.read_schema(path).remove_metadata())
        except pa.ArrowInvalid as error:
            raise DataError(f"{path}: expected a Parquet file: {error}.") from error
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"{files[0].parent}: expected files with the same columns: {error}.") from error


def _read_parquet(files: Sequence[Path]) -> pa.Table:
    schema = _parquet_schema(files)
    try:
        return ds.dataset([str(p) for p in files], format="parquet", schema=schema).to_table()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{files[0]}: could not be read: {error}.") from error


def _rows_of_split(table: pa.Table, data: str, split: str) -> pa.Table:
    """The rows of a single file whose column `split`, or verl's `extra_info.split`, has this value."""
    of_row = _split_column(table)
    if of_row is None:
        raise DataError(
            f"{data}: expected 'split' or 'extra_info.split' to choose split {split!r} by, found columns: "
            f"{_listed(table.column_names)}. Fix: leave split= out, or name a folder with a file for each split."
        )
    chosen = table.filter(pa.array([value == split for value in of_row]))
    if not len(chosen):
        there = sorted({str(value) for value in of_row})
        raise DataError(f"{data}: no row of split {split!r}; there are: {_listed(there)}. Fix: split={there[0]!r}.")
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


# JSONL. Not through pyarrow.json: it reads texts that look like dates as dates, and does not name the line.


def _lines(files: Sequence[Path], limit: int | None = None) -> list[Line]:
    decode = msgspec.json.Decoder().decode
    found: list[Line] = []
    for path in files:
        with path.open("rb") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    found.append((path, number, _object(path, number, line, decode)))
                if limit is not None and len(found) >= limit:
                    break
    if not found:
        raise DataError(f"{files[0]}: expected at least one row, found an empty file. Fix: name a file that has rows.")
    return found


def _object(path: Path, number: int, line: bytes, decode: Any) -> dict[str, Any]:
    try:
        row = decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = line[:60].decode("utf-8", "replace").strip()
        raise DataError(f"{path}:{number}: expected one JSON object a line, found {shown!r}: {error}.") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: expected one JSON object a line, found {type(row).__name__}.")
    return row


def _table(lines: Sequence[Line]) -> pa.Table:
    names = dict.fromkeys(name for _, _, row in lines for name in row)
    return pa.table({name: _column(name, lines) for name in names})


def _column(name: str, lines: Sequence[Line]) -> pa.Array:
    try:
        return pa.array([row.get(name) for _, _, row in lines])
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise DataError(_odd_line(name, lines, error)) from error


def _odd_line(name: str, lines: Sequence[Line], error: BaseException) -> str:
    """Name the first line whose value cannot stand in one column with the first value."""
    there = [line for line in lines if line[2].get(name) is not None]
    first = there[0][2][name]
    for path, number, row in there:
        try:
            pa.array([first, row[name]])
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            return (
                f"{path}:{number}: column {name!r}: expected a value like {str(first)[:40]!r} in line {there[0][1]}, "
                f"found {str(row[name])[:40]!r}. Fix: one type for each column."
            )
    return f"{lines[0][0]}: column {name!r}: {error}. Fix: one type for each column."
