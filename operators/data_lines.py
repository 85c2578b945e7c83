"""Users' JSONL: one JSON object per line.

Owns: reading the lines, naming a wrong one, and the columns that they form. Does not own: which
files there are, what a column is for (data_files.py).

It does not use pyarrow.json, which turns texts that look like dates into dates, and names no line.
"""

from __future__ import annotations

import codecs
import errno
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from dataflow.errors import DataError
from operators.data_json import make_json_array

Line = tuple[Path, int, dict[str, Any]]
"""File, line number from 1, and the JSON object on it."""

_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
_LONG = 400
"""Characters of a path from which on an error shows its ends alone."""

_NESTS = (dict, list)
_NESTED = 200
"""The most levels of lists and objects in a value; Arrow reads no deeper ones."""


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """Raise an error of the operating system as DataError, while a data file is read."""
    try:
        yield
    except OSError as error:
        problem = error.strerror or error
        name = str(path)
        if len(name) >= _LONG:
            name = f"{name[:100]}...{name[-100:]}"
        raise DataError(
            f"{name}: cannot be read: {problem}. Fix: {_suggest_fix(error)}."
        ) from error


def _suggest_fix(error: OSError) -> str:
    fixes = {
        errno.EACCES: "its rights (ls -l)",
        errno.ENAMETOOLONG: "a shorter name",
        errno.ELOOP: "mend the link",
    }
    return fixes.get(error.errno or 0, "look at the file and its disk")


def read_lines(files: Sequence[Path], limit: int | None = None) -> list[Line]:
    """Read the rows of these files without blank lines, at most `limit`. Raises DataError, naming
    the line.
    """
    decode = msgspec.json.Decoder().decode
    lines: list[Line] = []
    for path in files:
        with reading_file(path), path.open("rb") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    lines.append((path, number, _parse_object(path, number, line, decode)))
                if limit is not None and len(lines) >= limit:
                    break
    if not lines:
        raise DataError(
            f"{files[0]}: expected at least one row, found an empty file. Fix: name a file that has"
            " rows."
        )
    return lines


def locate_line(files: Sequence[Path], row: int) -> str:
    """Find `file:line` of a row, counted from 0 over all files."""
    path, number, _ = read_lines(files, row + 1)[row]
    return f"{path}:{number}"


def _parse_object(path: Path, number: int, line: bytes, decode: Any) -> dict[str, Any]:
    """Parse the object on a line; called for every line, so the place is only formatted when
    needed.

    Each key has one colon: with as many colons as keys, no key can be there twice. Otherwise colons
    after quotes are counted, and only if these are more, too, is the line parsed again.
    """
    if number == 1:
        _refuse_mark(f"{path}:1", line)
    try:
        row = decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(_describe_undecoded(f"{path}:{number}", line, error)) from error
    if type(row) is not dict:
        fix = '{"prompt": "..."} on each line'
        raise DataError(
            f"{path}:{number}: expected one JSON object a line, found {type(row).__name__}. Fix:"
            f" {fix}."
        )
    key_count = _count_keys(row)
    if key_count is None:
        raise DataError(_describe_too_deep(f"{path}:{number}"))
    if line.count(b":") != key_count:
        # A key with white space before its colon is not counted by `":`.
        has_space = b'" ' in line or b'"\t' in line
        if has_space or line.count(b'":') != key_count:
            _refuse_repeated_keys(f"{path}:{number}", line)
    return row


def _describe_undecoded(where: str, line: bytes, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return _describe_too_deep(where)
    if isinstance(error, UnicodeDecodeError):
        found_bytes = _describe_bytes(line)
        return f"{where}: expected UTF-8, found {found_bytes}. Fix: save the file as UTF-8."
    beginning = line[:60].decode("utf-8", "replace").strip()
    fix = "one whole object on each line, as json.dumps writes it"
    return f"{where}: expected one JSON object a line, found {beginning!r}: {error}. Fix: {fix}."


def _refuse_mark(where: str, line: bytes) -> None:
    if line.startswith(codecs.BOM_UTF8):
        fix = "save the file as UTF-8 without it"
        raise DataError(f"{where}: expected JSON, found a byte order mark (EF BB BF). Fix: {fix}.")
    if line.startswith(_WIDE):
        raise DataError(
            f"{where}: expected UTF-8, found UTF-16 or UTF-32. Fix: save the file as UTF-8."
        )
    if line.startswith((b"PAR1", b"\x1f\x8b", b"PK")):
        kinds = {b"PAR1": "a Parquet file", b"\x1f\x8b": "gzip", b"PK": "a zip archive"}
        kind = next(name for start, name in kinds.items() if line.startswith(start))
        raise DataError(
            f"{where}: expected lines of JSON, found {kind}. Fix: the ending that it is, or"
            " unpack it."
        )


def _describe_bytes(line: bytes) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte 0x{line[error.start]:02X} at column {error.start + 1}"
    return "bytes of something else"


def _count_keys(row: dict[str, Any]) -> int | None:
    """Count the keys in all objects of a row; None if it is nested too deeply."""
    count, depth = len(row), 1
    level = [v for v in row.values() if type(v) in _NESTS]
    while level:
        depth += 1
        if depth > _NESTED:
            return None
        deeper: list[Any] = []
        for nest in level:
            inside = nest
            if type(nest) is dict:
                count += len(nest)
                inside = nest.values()
            deeper += [v for v in inside if type(v) in _NESTS]
        level = deeper
    return count


def _describe_too_deep(where: str) -> str:
    return (
        f"{where}: expected at most {_NESTED} levels of lists and objects, found more. Fix: keep it"
        " as text."
    )


def _refuse_repeated_keys(where: str, line: bytes) -> None:
    """Raise DataError for an object with the same key twice: either value might be meant."""

    def refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
        keys: set[str] = set()
        for key, _ in pairs:
            if key in keys:
                raise DataError(
                    f"{where}: expected each key once, found {key!r} twice. Fix: leave one out."
                )
            keys.add(key)

    json.loads(line, object_pairs_hook=refuse_repeated)


def make_table(lines: Sequence[Line]) -> pa.Table:
    """Make columns of the lines. Raises DataError, naming the line, for a value that does not fit
    its column.
    """
    names: dict[str, None] = {}
    for _, _, row in lines:
        names.update(dict.fromkeys(row))
    return pa.table({name: _make_column(name, lines) for name in names})


_ARROW_REFUSES = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowNotImplementedError,
    OverflowError,
    UnicodeEncodeError,
)


def _make_column(name: str, lines: Sequence[Line]) -> pa.Array:
    try:
        return _make_array(name, lines)
    except _ARROW_REFUSES as error:
        raise DataError(_describe_odd_line(name, lines, error)) from error


def _make_array(name: str, lines: Sequence[Line]) -> pa.Array:
    def place(row: int) -> str:
        path, number, _ = lines[row]
        return f"{path}:{number}: column {name!r}"

    return make_json_array(name, [row.get(name) for _, _, row in lines], place)


def _describe_odd_line(name: str, lines: Sequence[Line], error: BaseException) -> str:
    """Name the first line whose value does not fit in one column with the first value."""
    present = [line for line in lines if line[2].get(name) is not None]
    first_path, first_number, first_row = present[0]
    first_text = repr(str(first_row[name])[:40])
    for line in present:
        path, number, row = line
        try:
            _make_array(name, [present[0], line])
        except _ARROW_REFUSES as refusal:
            where = f"{path}:{number}: column {name!r}"
            text = repr(str(row[name])[:40])
            if path == first_path and number == first_number:
                return f"{where}: {text}: {refusal}. Fix: a value that fits."
            return (
                f"{where}: expected a value like {first_text} in line {first_number}, found {text}."
                " Fix: one type for each column."
            )
    return f"{lines[0][0]}: column {name!r}: {error}. Fix: one type for each column."
