"""Lines of metrics.jsonl, read back: by a run that goes on, and by whoever looks at one.

Owns: what is a row, and which rows count. Does not own: writing them (sinks.py), which of them
answer a question (engine/keep/reader).

A row is a whole line, with its newline, that holds a JSON object with a Step. A last line without a
newline was torn, by a kill or a full disk, and is left out. Steps ascend: a row takes the place of
all before it from its own Step on, as if the run had gone back to a checkpoint there.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec

from dataflow.errors import DataError

METRICS = "metrics.jsonl"
LONGEST = 8 << 20
"""Bytes of a line; nothing is read behind a longer one."""
_TAIL = 1 << 17
"""Bytes at the end of the file in which the last rows are looked for: about eighty Steps."""

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse a whole line; None for one that is no row."""
    try:
        row = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    step = row.get("step")
    if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
        return row
    return None


def finite(number: Any) -> float | None:
    """A number of a row; None for one that was not finite, and for anything else."""
    is_finite = isinstance(number, int | float) and abs(number) <= sys.float_info.max
    if is_finite:
        return number
    return None


def whole_lines(file: BinaryIO, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """(where it begins, line) of each whole line from there on; a torn last one is left out."""
    file.seek(start)
    while (line := file.readline(LONGEST)).endswith(b"\n"):
        yield start, line
        start += len(line)


def settled_rows(rows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The rows that count, of (Step, where its line begins) of all in the order of the file."""
    settled: list[tuple[int, int]] = []
    for step, start in rows:
        while settled and settled[-1][0] >= step:
            settled.pop()
        settled.append((step, start))
    return settled


# --- by a run, which stops at what is damaged ----------------------------------------------------


def require_rows(file: IO[bytes], path: Path) -> Iterator[tuple[int, int]]:
    """(offset behind the line, its Step) of each row. Raises DataError for any other line but the
    last, which may be torn.
    """
    stop = 0
    for number, line in enumerate(file, start=1):
        stop += len(line)
        if line.endswith(b"\n"):
            row = parse_row(line)
        else:
            row = None
        if row is None:
            if file.read(1):
                problem = f"expected a JSON object with a step, found {line[:40]!r}"
                fix = "restore the file, or delete the line"
                raise DataError(f"{path}:{number}: {problem}. Fix: {fix}.")
            return
        yield stop, row["step"]


def recorded_steps(path: Path) -> list[int]:
    """The Steps of a metrics file's rows; none without a file. Raises DataError for other lines."""
    if path.is_file():
        content = path.read_bytes()
    else:
        content = b""
    return [step for step, _ in _placed_rows(content, path)]


def _placed_rows(content: bytes, path: Path) -> list[tuple[int, int]]:
    """(Step, where its line begins) of the rows that count."""
    placed: list[tuple[int, int]] = []
    start = 0
    for stop, step in require_rows(io.BytesIO(content), path):
        placed.append((step, start))
        start = stop
    return settled_rows(placed)


def recorded_rows(path: Path) -> Iterator[dict[str, float | None]]:
    """A metrics file's rows, all of one moment, also while a run goes on; none without a file.
    Raises DataError for lines that are no rows.
    """
    if path.is_file():
        content = path.read_bytes()
    else:
        content = b""
    for _, start in _placed_rows(content, path):
        row = parse_row(content[start : content.index(b"\n", start)])
        assert row is not None, "it was one above"
        yield row


def recorded_row(path: Path, step: int) -> dict[str, float | None]:
    """A Step's row in a metrics file; empty where there is none. Raises DataError."""
    return next((row for row in recorded_rows(path) if row["step"] == step), {})


# --- by who looks, whatever is in the file -------------------------------------------------------


class MetricTail:
    """The last rows of a metrics file, the newest first; of its end alone, each parsed once it is
    asked for. problems: what is said of lines that are no rows.
    """

    def __init__(self, file: BinaryIO | None, name: str) -> None:
        self._name = name
        self._lines: list[bytes] = []
        self._rows: list[dict[str, Any]] = []
        self.problems: list[str] = []
        if file is not None:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read(_TAIL).split(b"\n")[:-1]
            # The first one may be the rest of a line.
            self._lines = lines if size <= _TAIL else lines[1:]

    def newest(self) -> dict[str, Any]:
        """The last row; empty without any."""
        return next(self.rows(), {})

    def rows(self) -> Iterator[dict[str, Any]]:
        """All of them, the newest first."""
        yield from self._rows
        while self._lines:
            line = self._lines.pop()
            row = parse_row(line)
            if row is None:
                self._note(line)
            elif not self._rows or row["step"] < self._rows[-1]["step"]:
                self._rows.append(row)
                yield row

    def _note(self, line: bytes) -> None:
        problem = f"{self._name}: expected a JSON object with a step, found {line[:40]!r}"
        if problem not in self.problems:
            self.problems.append(problem)
