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
from operators.data_json import json_array
from operators.data_lines import opened_for
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
    """All rows. A column for messages whose first value is a JSON list of messages is parsed; with
    other values it is text, as `text` is. Another column is whole numbers (int64) or numbers
    (float64) if each of its values is written as one, empty ones being null; all others are text.

    Raises DataError naming the file and, where it is known, the row.
    """
    tables = [_read_text(path) for path in files]
    whole = pa.concat_tables(tables, promote_options="default").combine_chunks()
    name = str(files[0] if len(files) == 1 else files[0].parent)
    return pa.table({c: _typed(name, c, whole.column(c)) for c in whole.column_names})


def rows_in(files: Sequence[Path]) -> int:
    """Rows of these files. Raises DataError like read_csv."""
    return sum(len(_read_text(path)) for path in files)


def _read_text(path: Path) -> pa.Table:
    names = _names(path)
    convert = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.utf8()))
    try:
        with opened_for(path):
            block = max(_LEAST, min(path.stat().st_size, _BLOCK))
            return pyarrow.csv.read_csv(
                path,
                read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=block),
                parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
                convert_options=convert,
            )
    except (pa.ArrowException, UnicodeDecodeError) as error:
        told = str(error).partition("\n")[0].rstrip(".")
        shown = "".join(c if c.isprintable() else "?" for c in told)
        raise DataError(
            f"{path}: expected CSV in UTF-8, each record with the {len(names)} columns of the first"
            f" line, found: {shown:.300}. Fix: quote values that have commas, quotes or line ends."
        ) from error


def _names(path: Path) -> list[str]:
    """The names in the first line. Raises DataError if one is missing or there twice."""
    try:
        with opened_for(path), path.open(encoding="utf-8-sig", newline="") as handle:
            names = next(filter(None, csv.reader(handle)), [])
    except (csv.Error, UnicodeDecodeError) as error:
        told = "".join(c if c.isprintable() else "?" for c in str(error))
        raise DataError(
            f"{path}:1: expected CSV in UTF-8, its first line column names, found: {told:.300}."
            " Fix: save it as CSV in UTF-8."
        ) from error
    if not names:
        raise DataError(
            f"{path}: expected a line of column names and at least one row, found empty lines. Fix:"
            " name a file that has rows."
        )
    for name in names:
        if not name or names.count(name) > 1:
            found = "an empty one" if not name else f"{name!r} twice"
            raise DataError(
                f"{path}:1: expected each column's name once, found {found}. Fix: the first line."
            )
    for mark, told in {";": "semicolons", "\t": "tabs"}.items():
        if len(names) == 1 and mark in names[0]:
            raise DataError(
                f"{path}:1: expected names between commas, found {told}: {names[0]!r:.80}. Fix:"
                " save it with commas."
            )
    return names


def _typed(file: str, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    given = column.filter(pc.not_equal(column, ""))
    if not len(given):
        return column
    first = given[0].as_py()
    if name in COLUMNS and _messages(first) is not None:
        return _parsed(file, name, column.to_pylist())
    if name in _TEXTS:
        return column
    for pattern, kind in ((_WHOLE, pa.int64()), (_DECIMAL, pa.float64())):
        if pc.all(pc.match_substring_regex(given, pattern)).as_py():
            empty = pc.equal(column, "")
            return pc.if_else(empty, pa.scalar(None, column.type), column).cast(kind)
    return column


def _parsed(file: str, name: str, texts: Sequence[str | None]) -> pa.Array:
    found = [_messages(text) if text else None for text in texts]
    for row, (text, messages) in enumerate(zip(texts, found, strict=True)):
        if text and messages is None:
            raise DataError(
                f"{file}: row {row}, column {name!r}: expected a JSON list of messages as in the"
                f" rows before, found {text!r:.80}. Fix: one form for all rows."
            )
    try:
        return json_array(name, found, lambda row: f"{file}: row {row}, column {name!r}")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"{file}: column {name!r}: expected messages of one form: {error}. Fix: the same fields"
            " with the same types in all messages."
        ) from error


def _messages(text: str) -> list[dict[str, Any]] | None:
    """A JSON list of messages; None for any other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    forms = ({"role", "content"}, {"from", "value"})
    fits = isinstance(found, list) and all(
        isinstance(m, dict) and any(form <= m.keys() for form in forms) for m in found
    )
    return found if fits and found else None
