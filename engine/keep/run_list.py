"""What run folders tell of their runs without reading much: how far each is, and how it ended.

Owns: the summary of a run folder, and which folders are runs. Does not own: the files that it reads
(run_folder.py, end_record.py, engine/keep/metrics/sinks.py), the table (engine/cli/runs.py).

It reads the end of metrics.jsonl, and writes nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.errors import RunError
from engine.keep.end_record import end_of
from engine.keep.run_folder import ENDED, is_held, is_run

NO_WORD = "ended without a word"
"""The state of a run that no process holds and that left no record of its end: it was killed, or is
of a version that kept none.
"""
_TAIL = 1 << 17
"""Bytes of metrics.jsonl that are read: about eighty Steps."""
_WRITTEN = ("versions.json", "metrics.jsonl", ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastValue:
    """The last number of a metric, and its Step; None: it was not finite."""

    metric: str
    value: float | None
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run folder. written: when it last got a Step or an end, in seconds since 1970.

    state: running, finished, interrupted, failed, `NO_WORD`, or unknown, which `problem` explains.
    steps: how many are asked for, None where the options do not say. phase: of a Program.
    """

    name: str
    path: str
    state: str = "unknown"
    reason: str = ""
    step: int = 0
    steps: int | None = None
    phase: int | None = None
    reward: LastValue | None = None
    evaluation: LastValue | None = None
    loss: LastValue | None = None
    nbytes: int = 0
    written: float = 0.0
    problem: str = ""


def summaries(folder: Path) -> tuple[list[RunSummary], int]:
    """The runs in a folder, or the one that it is, the last written first; and how many other
    folders are in it. A run that is deleted meanwhile is left out. Raises OSError if the folder
    cannot be read.
    """
    if is_run(folder):
        return [summary(folder)], 0
    found: list[RunSummary] = []
    others = 0
    with os.scandir(folder) as entries:
        paths = [Path(entry.path) for entry in entries if entry.is_dir()]
    for path in paths:
        try:
            if is_run(path):
                found.append(summary(path))
            else:
                others += 1
        except FileNotFoundError:
            continue
        except OSError as error:
            found.append(RunSummary(name=path.name, path=str(path), problem=str(error)))
    return sorted(found, key=lambda run: (-run.written, run.name)), others


def summary(path: Path) -> RunSummary:
    """What a run folder tells. Raises OSError if it is gone, or closed."""
    problems: list[str] = []
    state, reason = _state(path, problems)
    rows = _Tail(path / "metrics.jsonl")
    newest = rows.newest()
    phase = newest.get("phase")
    return RunSummary(
        name=path.name,
        path=str(path),
        state=state,
        reason=reason,
        step=newest.get("step", 0),
        steps=_steps(path / "options.json", problems),
        phase=phase if isinstance(phase, int) else None,
        reward=rows.last("reward/", "reward/mean") or rows.last("rows/", ends="/reward/mean"),
        evaluation=rows.last("eval/", "eval/reward", but="eval/initial/"),
        loss=rows.last("loss/"),
        nbytes=_nbytes(path),
        written=max(_times(path)),
        problem="; ".join([*problems, *rows.problems]),
    )


def newest_row(path: Path) -> dict[str, Any]:
    """The last whole row of a metrics file; empty without any."""
    return _Tail(path).newest()


def _state(path: Path, problems: list[str]) -> tuple[str, str]:
    try:
        end = end_of(path)
        if end is not None:
            return end.state, end.reason
        return ("running", "") if is_held(path) else (NO_WORD, "")
    except (RunError, OSError) as error:
        problems.append(str(error))
        return "unknown", ""


def _times(path: Path) -> Iterator[float]:
    yield (path / "versions.json").stat().st_mtime
    for name in _WRITTEN[1:]:
        if (path / name).is_file():
            yield (path / name).stat().st_mtime


def finite(value: Any) -> float | None:
    """A number of a metrics row; None for one that was not finite, and for anything else."""
    known = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return value if known else None


class _Tail:
    """The last whole lines of a metrics file, of which only those that are asked for are parsed; a
    last line that is half written is left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self.problems: list[str] = []
        if path.is_file():
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL))
                lines = file.read().split(b"\n")[:-1]
            self._lines = list(reversed(lines if size <= _TAIL else lines[1:]))

    def newest(self) -> dict[str, Any]:
        """The last row; empty without any."""
        return self._row(self._lines[0]) if self._lines else {}

    def last(
        self, begins: str, first: str = "", *, but: str = "none", ends: str = ""
    ) -> LastValue | None:
        """The newest number of metrics that begin and end so: `first`, else the first by name."""
        for line in self._lines:
            row = self._row(line) if f'"{begins}'.encode() in line else {}
            names = [n for n in row if n.startswith(begins) and not n.startswith(but)]
            names = sorted(n for n in names if n.endswith(ends))
            if names:
                name = first if first in names else names[0]
                value = row[name]
                return LastValue(metric=name, value=finite(value), step=row["step"])
        return None

    def _row(self, line: bytes) -> dict[str, Any]:
        """A line's object; empty, with a problem, if it is none."""
        try:
            row = json.loads(line)
            if isinstance(row["step"], int):
                return row
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        problem = f"{self._path}: expected a JSON object with a step, found {line[:40]!r}"
        if problem not in self.problems:
            self.problems.append(problem)
        return {}


def _steps(path: Path, problems: list[str]) -> int | None:
    if not path.is_file():
        return None
    try:
        options = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path}: expected JSON, found {error}")
        return None
    steps = options.get("steps") if isinstance(options, Mapping) else None
    return steps if isinstance(steps, int) else None


def _nbytes(path: Path) -> int:
    """Bytes of all files in a folder; what a link leads to does not count."""
    total, waiting = 0, [str(path)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:  # a run that goes on deletes old checkpoints
            continue
    return total
