"""metrics.jsonl of a run, indexed as it grows: where each Step's line is, columns on demand.

Owns: the index and its columns. Does not own: the file (engine/keep/metrics/sinks.py).

Only metrics that somebody asks for are parsed into columns, of which the least recently used go
first. A resume cuts the file, and an evaluation replaces its last line: the last lines that are
known are compared with the file's, and the index goes back as far as they differ.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import msgspec
import numpy as np

from engine.keep.metrics.metric_lines import (
    LONGEST,
    METRICS,
    parse_row,
    settled_rows,
    whole_lines,
)
from engine.keep.reader.open_folder import FileMark, OpenFolder

_ROOM = 12 << 20
"""Bytes of columns that are kept of a run."""


class GrowingArray:
    """An array that grows at its end."""

    def __init__(self, kind: type[np.generic]) -> None:
        self._whole = np.empty(1024, dtype=kind)
        self.size = 0

    @property
    def values(self) -> np.ndarray:
        """What is in it; not to be kept beyond the next change."""
        return self._whole[: self.size]

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes

    def append(self, number: float) -> None:
        """Add one."""
        if self.size == len(self._whole):
            more = max(1024, self.size // 4)
            self._whole = np.concatenate([self._whole, np.empty(more, self._whole.dtype)])
        self._whole[self.size] = number
        self.size += 1

    def cut(self, size: int) -> None:
        """Keep the first ones."""
        self.size = min(self.size, size)


class MetricIndex:
    """What is where in one run's metrics.jsonl. Its methods may be called by several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._steps = GrowingArray(np.int64)
        self._starts = GrowingArray(np.int64)
        self._end = 0
        self._ends: list[bytes] = []
        self._mark: FileMark | None = None
        self._columns: OrderedDict[str, GrowingArray] = OrderedDict()
        self._names: dict[str, None] = {}
        self.last: dict[str, Any] = {}
        """The last Step's row; empty without any."""

    @property
    def names(self) -> list[str]:
        """List all metrics that some Step has, in order."""
        return sorted(self._names)

    @property
    def steps(self) -> np.ndarray:
        """int64: the Steps, ascending."""
        with self._lock:
            return self._steps.values.copy()

    def refresh(self, folder: OpenFolder) -> bool:
        """Take note of what has changed in the file; whether anything had."""
        with self._lock:
            mark = folder.mark(METRICS)
            if mark == self._mark:
                return False
            file = folder.open(METRICS)
            if file is None:
                self._forget(0)
            else:
                with file:
                    self._go_back(file)
                    self._read_on(file)
            self._mark = mark
            return True

    def columns(self, folder: OpenFolder, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """(name, float64 by Step, nan where a Step has none) of each; parsed a few at a time."""
        with self._lock:
            self.refresh(folder)
            many = max(1, _ROOM // max(1, self._steps.size * 10))
            for first in range(0, len(names), many):
                group = names[first : first + many]
                self._parse(folder, group)
                yield from ((name, self._columns[name].values) for name in group)

    def row(self, folder: OpenFolder, step: int) -> dict[str, Any]:
        """A Step's row; empty where there is none."""
        with self._lock:
            self.refresh(folder)
            at = int(np.searchsorted(self._steps.values, step))
            if at == self._steps.size or self._steps.values[at] != step:
                return {}
            file = folder.open(METRICS)
            if file is None:
                return {}
            with file:
                file.seek(int(self._starts.values[at]))
                return parse_row(file.readline(LONGEST)) or {}

    def _go_back(self, file: BinaryIO) -> None:
        """Forget the lines that are not in the file any more."""
        known_count = self._steps.size
        for back, line in enumerate(reversed(self._ends)):
            file.seek(int(self._starts.values[known_count - 1]))
            if file.read(len(line)) == line:
                if back:
                    self._forget(known_count)
                return
            known_count -= 1
        self._forget(0)

    def _forget(self, kept_count: int) -> None:
        """Go back to so many Steps."""
        if kept_count == 0:
            self._names, self._ends, self._end, self.last = {}, [], 0, {}
        else:
            self._end = int(self._starts.values[kept_count])
            self._ends = self._ends[: kept_count - self._steps.size]
            self.last = parse_row(self._ends[-1]) or {}
        for array in (self._steps, self._starts, *self._columns.values()):
            array.cut(kept_count)

    def _replace_from(self, step: int) -> None:
        """Drop the rows of this Step and of later ones: the file has a newer row of it."""
        count = int(np.searchsorted(self._steps.values, step))
        dropped = self._steps.size - count
        self._ends = self._ends[: max(0, len(self._ends) - dropped)]
        for array in (self._steps, self._starts, *self._columns.values()):
            array.cut(count)

    def _read_on(self, file: BinaryIO) -> None:
        """Index the whole lines behind the known ones. Lines that are no rows are left out."""
        if self._steps.size:
            newest = int(self._steps.values[-1])
        else:
            newest = -1
        for start, line in whole_lines(file, self._end):
            row = parse_row(line)
            if row is not None:
                if row["step"] <= newest:
                    self._replace_from(row["step"])
                newest = row["step"]
                self._steps.append(newest)
                self._starts.append(start)
                self._names.update(dict.fromkeys(row))
                self._ends = [*self._ends[-3:], line]
                self.last = row
            self._end = start + len(line)
        self._names.pop("step", None)

    def _parse(self, folder: OpenFolder, names: Sequence[str]) -> None:
        """Make the columns of these whole, in one pass over the lines that some lack."""
        for name in names:
            self._columns.setdefault(name, GrowingArray(np.float64))
            self._columns.move_to_end(name)
        self._make_room(len(names))
        parsed_count = min(self._columns[name].size for name in names)
        lacking = [name for name in names if self._columns[name].size < self._steps.size]
        if lacking:
            file = folder.open(METRICS)
        else:
            file = None
        for name in lacking:
            self._columns[name].cut(parsed_count)
        fields = [(f"v{i}", Any, None) for i in range(len(lacking))]
        called = {f"v{i}": name for i, name in enumerate(lacking)}
        kind = msgspec.defstruct("Row", fields, rename=called)
        decode = msgspec.json.Decoder(kind).decode
        arrays = [self._columns[name] for name in lacking]
        for line in self._known_lines(file, parsed_count):
            for array, number in zip(arrays, _values(decode, line, len(arrays)), strict=True):
                array.append(number if isinstance(number, int | float) else np.nan)

    def _known_lines(self, file: BinaryIO | None, done: int) -> Iterator[bytes]:
        """The lines of all Steps but the first `done`; empty ones where the file is gone."""
        starts = self._starts.values[done:].tolist()
        if file is None:
            yield from (b"" for _ in starts)
            return
        with file:
            here = -1
            for start in starts:
                if here != start:
                    file.seek(start)
                line = file.readline(LONGEST)
                here = start + len(line)
                yield line

    def _make_room(self, asked: int) -> None:
        """Drop the columns that nobody has asked for longest."""
        while len(self._columns) > asked and self._nbytes() > _ROOM:
            self._columns.popitem(last=False)

    def _nbytes(self) -> int:
        return sum(max(column.nbytes, self._steps.size * 8) for column in self._columns.values())


def _values(decode: Callable[[bytes], Any], line: bytes, count: int) -> Sequence[Any]:
    """The values of a line's columns; none of them where it has become another line."""
    try:
        return msgspec.structs.astuple(decode(line))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [None] * count


def ascending_rows(folder: OpenFolder) -> Iterator[dict[str, Any]]:
    """Read all rows of a run's metrics in order, one at a time; other lines are left out."""
    file = folder.open(METRICS)
    if file is None:
        return
    with file:
        parsed = ((start, parse_row(line)) for start, line in whole_lines(file))
        rows = settled_rows((row["step"], start) for start, row in parsed if row is not None)
        for _, start in rows:
            file.seek(start)
            row = parse_row(file.readline(LONGEST))
            if row is not None:  # else the file has changed meanwhile
                yield row
