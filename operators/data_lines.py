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
from operators.data_json import json_array

Line = tuple[Path, int, dict[str, Any]]
"""File, line number from 1, and the JSON object on it."""

_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
_LONG = 400
_NESTS = (dict, list)
_NESTED = 200
"""The most levels of lists and objects in a value; Arrow reads no deeper ones."""


@contextmanager
def opened_for(path: Path) -> Iterator[None]:
    """While a data file is read: raise an error of the operating system as DataError."""
    try:
        yield
    except OSError as error:
        told, name = error.strerror or error, str(path)
        name = name if len(name) < _LONG else f"{name[:100]}...{name[-100:]}"
        raise DataError(f"{name}: cannot be read: {told}. Fix: {_way_out(error)}.") from error


def _way_out(error: OSError) -> str:
    known = {
        errno.EACCES: "its rights (ls -l)",
        errno.ENAMETOOLONG: "a shorter name",
        errno.ELOOP: "mend the link",
    }
    return known.get(error.errno or 0, "look at the file and its disk")


def read_lines(files: Sequence[Path], limit: int | None = None) -> list[Line]:
    """The rows of these files without blank lines, at most `limit`. Raises DataError, naming the
    line.
    """
    decode = msgspec.json.Decoder().decode
    found: list[Line] = []
    for path in files:
        with opened_for(path), path.open("rb") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    found.append((path, number, _object(path, number, line, decode)))
                if limit is not None and len(found) >= limit:
                    break
    if not found:
        raise DataError(
            f"{files[0]}: expected at least one row, found an empty file. Fix: name a file that has"
            " rows."
        )
    return found


def place_of(files: Sequence[Path], row: int) -> str:
    """`file:line` of a row, counted from 0 over all files."""
    path, number, _ = read_lines(files, row + 1)[row]
    return f"{path}:{number}"


def _object(path: Path, number: int, line: bytes, decode: Any) -> dict[str, Any]:
    """The object on a line; called for every line, so the place is only formatted when needed.

    Each key has one colon: with as many colons as keys, no key can be there twice. Otherwise colons
    after quotes are counted, and only if these are more, too, is the line parsed again.
    """
    if number == 1:
        _refuse_mark(f"{path}:1", line)
    try:
        row = decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(_undecoded(f"{path}:{number}", line, error)) from error
    if type(row) is not dict:
        fix = '{"prompt": "..."} on each line'
        raise DataError(
            f"{path}:{number}: expected one JSON object a line, found {type(row).__name__}. Fix:"
            f" {fix}."
        )
    keys = _keys(row)
    if keys is None:
        raise DataError(_too_deep(f"{path}:{number}"))
    if line.count(b":") != keys and (line.count(b'":') != keys or b'" ' in line or b'"\t' in line):
        _refuse_repeated(f"{path}:{number}", line)
    return row


def _undecoded(where: str, line: bytes, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return _too_deep(where)
    if isinstance(error, UnicodeDecodeError):
        return f"{where}: expected UTF-8, found {_odd_bytes(line)}. Fix: save the file as UTF-8."
    shown = line[:60].decode("utf-8", "replace").strip()
    fix = "one whole object on each line, as json.dumps writes it"
    return f"{where}: expected one JSON object a line, found {shown!r}: {error}. Fix: {fix}."


def _refuse_mark(where: str, line: bytes) -> None:
    if line.startswith(codecs.BOM_UTF8):
        fix = "save the file as UTF-8 without it"
        raise DataError(f"{where}: expected JSON, found a byte order mark (EF BB BF). Fix: {fix}.")
    if line.startswith(_WIDE):
        raise DataError(
            f"{where}: expected UTF-8, found UTF-16 or UTF-32. Fix: save the file as UTF-8."
        )
    if line.startswith((b"PAR1", b"\x1f\x8b", b"PK")):
        kind = {b"PAR1": "a Parquet file", b"\x1f\x8b": "gzip", b"PK": "a zip archive"}
        found = next(name for start, name in kind.items() if line.startswith(start))
        raise DataError(
            f"{where}: expected lines of JSON, found {found}. Fix: the ending that it is, or"
            " unpack it."
        )


def _odd_bytes(line: bytes) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte 0x{line[error.start]:02X} at column {error.start + 1}"
    return "bytes of something else"


def _keys(row: dict[str, Any]) -> int | None:
    """The number of keys in all objects of a row; None if it is nested too deeply."""
    count, depth = len(row), 1
    level = [v for v in row.values() if type(v) in _NESTS]
    while level:
        depth += 1
        if depth > _NESTED:
            return None
        deeper: list[Any] = []
        for value in level:
            inside = value
            if type(value) is dict:
                count += len(value)
                inside = value.values()
            deeper += [v for v in inside if type(v) in _NESTS]
        level = deeper
    return count


def _too_deep(where: str) -> str:
    return (
        f"{where}: expected at most {_NESTED} levels of lists and objects, found more. Fix: keep it"
        " as text."
    )


def _refuse_repeated(where: str, line: bytes) -> None:
    """Raises DataError for an object with the same key twice: either value might be meant."""

    def pairs(found: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in found:
            if key in seen:
                raise DataError(
                    f"{where}: expected each key once, found {key!r} twice. Fix: leave one out."
                )
            seen.add(key)

    json.loads(line, object_pairs_hook=pairs)


def table_of(lines: Sequence[Line]) -> pa.Table:
    """The lines as columns. Raises DataError, naming the line, for a value that does not fit its
    column.
    """
    names = dict.fromkeys(name for _, _, row in lines for name in row)
    return pa.table({name: _column(name, lines) for name in names})


_ODD = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowNotImplementedError,
    OverflowError,
    UnicodeEncodeError,
)


def _column(name: str, lines: Sequence[Line]) -> pa.Array:
    try:
        return _array(name, lines)
    except _ODD as error:
        raise DataError(_odd_line(name, lines, error)) from error


def _array(name: str, lines: Sequence[Line]) -> pa.Array:
    def place(row: int) -> str:
        path, number, _ = lines[row]
        return f"{path}:{number}: column {name!r}"

    return json_array(name, [row.get(name) for _, _, row in lines], place)


def _odd_line(name: str, lines: Sequence[Line], error: BaseException) -> str:
    """Name the first line whose value does not fit in one column with the first value."""
    there = [line for line in lines if line[2].get(name) is not None]
    first = there[0][2][name]
    for line in there:
        path, number, row = line
        try:
            _array(name, [there[0], line])
        except _ODD as odd:
            if path == there[0][0] and number == there[0][1]:
                return (
                    f"{path}:{number}: column {name!r}: {str(row[name])[:40]!r}: {odd}. Fix: a"
                    " value that fits."
                )
            return (
                f"{path}:{number}: column {name!r}: expected a value like {str(first)[:40]!r} in"
                f" line {there[0][1]}, found {str(row[name])[:40]!r}. Fix: one type for each"
                " column."
            )
    return f"{lines[0][0]}: column {name!r}: {error}. Fix: one type for each column."
