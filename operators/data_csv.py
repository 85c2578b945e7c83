"""Users' CSV: a line of names, then one row for each record.

Owns: reading files as text, which columns are numbers or messages. Does not own: which files there
are, what a column is for (data_files.py, data_shapes.py).

pyarrow's own guesses are not used: they turn texts that look like dates into dates, and 007 into 7.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from dataflow.errors import DataError
from operators.data_json import make_json_array
from operators.data_lines import reading_file
from operators.data_parts import COLUMNS

pc: Any = pyarrow.compute
"""Its functions are made as it is imported, so no type checker knows them."""

_WHOLE = r"^-?(0|[1-9][0-9]{0,17})$"
_DECIMAL = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_TEXTS = {*COLUMNS, "text"}
"""Columns that are never numbers: an answer that is one is still read as text."""
_LEAST, _BLOCK = 1 << 10, 1 << 30
"""Bytes that are parsed at a time, the least and the most; a record is no longer than that."""


def read_csv(files: Sequence[Path]) -> pa.Table:
    """Read all rows. A column for messages whose first value is a JSON list of messages is parsed;
    with other values it is text, as `text` is. Another column is whole numbers (int64) or numbers
    (float64) if each of its values is written as one, empty ones being null; all others are text.

    Raises DataError naming the file and, where it is known, the row.
    """
    tables = [_read_text(path) for path in files]
    whole = pa.concat_tables(tables, promote_options="default").combine_chunks()
    source = files[0] if len(files) == 1 else files[0].parent
    columns: dict[str, Any] = {}
    for name in whole.column_names:
        columns[name] = _convert(str(source), name, whole.column(name))
    return pa.table(columns)


def count_csv_rows(files: Sequence[Path]) -> int:
    """Count the rows of these files. Raises DataError like read_csv."""
    return sum(len(_read_text(path)) for path in files)


def _read_text(path: Path) -> pa.Table:
    names = _read_names(path)
    text_types = dict.fromkeys(names, pa.utf8())
    try:
        with reading_file(path):
            block = max(_LEAST, min(path.stat().st_size, _BLOCK))
            return pyarrow.csv.read_csv(
                path,
                read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=block),
                parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
                convert_options=pyarrow.csv.ConvertOptions(column_types=text_types),
            )
    except (pa.ArrowException, UnicodeDecodeError) as error:
        line, _, _ = str(error).partition("\n")
        problem = _printable(line.rstrip("."))
        raise DataError(
            f"{path}: expected CSV in UTF-8, each record with the {len(names)} columns of the first"
            f" line, found: {problem:.300}. Fix: quote values that have commas, quotes or line"
            " ends."
        ) from error


def _printable(text: str) -> str:
    """The text with a question mark for each byte of the file that cannot be shown."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _read_names(path: Path) -> list[str]:
    """Read the names in the first line. Raises DataError if one is missing or there twice."""
    try:
        with reading_file(path), path.open(encoding="utf-8-sig", newline="") as handle:
            names = next(filter(None, csv.reader(handle)), [])
    except (csv.Error, UnicodeDecodeError) as error:
        problem = _printable(str(error))
        raise DataError(
            f"{path}:1: expected CSV in UTF-8, its first line column names, found: {problem:.300}."
            " Fix: save it as CSV in UTF-8."
        ) from error
    if not names:
        raise DataError(
            f"{path}: expected a line of column names and at least one row, found empty lines. Fix:"
            " name a file that has rows."
        )
    _require_each_once(path, names)
    _require_commas(path, names)
    return names


def _require_each_once(path: Path, names: Sequence[str]) -> None:
    for name in names:
        if name and names.count(name) == 1:
            continue
        problem = f"{name!r} twice" if name else "an empty one"
        raise DataError(
            f"{path}:1: expected each column's name once, found {problem}. Fix: the first line."
        )


def _require_commas(path: Path, names: Sequence[str]) -> None:
    """Raise DataError for a single name that seems to be several."""
    for mark, description in {";": "semicolons", "\t": "tabs"}.items():
        if len(names) == 1 and mark in names[0]:
            raise DataError(
                f"{path}:1: expected names between commas, found {description}: {names[0]!r:.80}."
                " Fix: save it with commas."
            )


def _convert(file: str, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """A column of texts as messages or as numbers, if that is what all of its texts are."""
    filled = column.filter(pc.not_equal(column, ""))
    if not len(filled):
        return column
    first = filled[0].as_py()
    if name in COLUMNS and _parse_messages(first) is not None:
        return _parse_column(file, name, column.to_pylist())
    if name in _TEXTS:
        return column
    for pattern, kind in ((_WHOLE, pa.int64()), (_DECIMAL, pa.float64())):
        is_number = pc.match_substring_regex(filled, pattern)
        if pc.all(is_number).as_py():
            is_empty = pc.equal(column, "")
            return pc.if_else(is_empty, pa.scalar(None, column.type), column).cast(kind)
    return column


def _parse_column(file: str, name: str, texts: Sequence[str | None]) -> pa.Array:
    """Parse a column of messages; an empty text is null."""
    rows: list[list[dict[str, Any]] | None] = []
    for row, text in enumerate(texts):
        messages = _parse_messages(text) if text else None
        if text and messages is None:
            raise DataError(
                f"{file}: row {row}, column {name!r}: expected a JSON list of messages as in the"
                f" rows before, found {text!r:.80}. Fix: one form for all rows."
            )
        rows.append(messages)
    try:
        return make_json_array(name, rows, lambda row: f"{file}: row {row}, column {name!r}")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"{file}: column {name!r}: expected messages of one form: {error}. Fix: the same fields"
            " with the same types in all messages."
        ) from error


def _parse_messages(text: str) -> list[dict[str, Any]] | None:
    """Parse a JSON list of messages; None for any other text, and for an empty list."""
    if not text.lstrip().startswith("["):
        return None
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return messages
    return None


def _is_message(element: Any) -> bool:
    if not isinstance(element, dict):
        return False
    return {"role", "content"} <= element.keys() or {"from", "value"} <= element.keys()
