"""What a run folder tells of its run without reading much: how far it is, and how it ended.

Owns: the summary of a run folder, which `runs`, `top`, the page and Prometheus share, so that they
say the same of a run; which folders are runs. Does not own: in which state a run is (run_state.py),
the files that it reads (engine/keep/run_folder.py, metrics/metric_lines.py), the table
(engine/cli/runs.py).

It reads the end of metrics.jsonl, and writes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.errors import DataflowError
from engine.keep.metrics.metric_lines import METRICS, MetricTail, finite
from engine.keep.reader.open_folder import OpenFolder, open_run
from engine.keep.reader.run_state import UNKNOWN, run_state
from engine.keep.run_folder import ENDED, is_run

OPTIONS = "options.json"
BEGINNING = "versions.json"
_WRITTEN = (BEGINNING, METRICS, ENDED)


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
    state: str = UNKNOWN
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


def read_summaries(folder: Path) -> tuple[list[RunSummary], int]:
    """The runs in a folder, or the one that it is, the last written first; and how many other
    folders are in it. A run that is deleted meanwhile is left out. Raises OSError if the folder
    cannot be read.
    """
    if is_run(folder):
        return [read_summary(folder)], 0
    runs: list[RunSummary] = []
    others = 0
    with os.scandir(folder) as entries:
        paths = [Path(entry.path) for entry in entries if entry.is_dir()]
    for path in paths:
        try:
            if is_run(path):
                runs.append(read_summary(path))
            else:
                others += 1
        except FileNotFoundError:
            continue
        except OSError as error:
            runs.append(RunSummary(name=path.name, path=str(path), problem=str(error)))
    return sorted(runs, key=lambda run: (-run.written, run.name)), others


def read_summary(path: Path) -> RunSummary:
    """What a run folder tells, its size with it. Raises OSError if it is gone, or closed."""
    with open_run(path) as folder:
        return summarize(folder, path, nbytes=_nbytes(path))


def summarize(folder: OpenFolder, path: Path, *, nbytes: int = 0) -> RunSummary:
    """What an open run folder tells. path: as it is named in what is said of it."""
    problems: list[str] = []
    state, reason = run_state(folder, path, problems)
    with metric_tail(folder, str(path / METRICS), problems) as tail:
        newest = tail.newest()
        reward = last_reward(tail)
        evaluation = _last(tail, "eval/", preferred="eval/reward", but="eval/initial/")
        loss = _last(tail, "loss/")
    phase = newest.get("phase")
    return RunSummary(
        name=path.name,
        path=str(path),
        state=state,
        reason=reason,
        step=newest.get("step", 0),
        steps=_steps(folder, path, problems),
        phase=phase if isinstance(phase, int) else None,
        reward=reward,
        evaluation=evaluation,
        loss=loss,
        nbytes=nbytes,
        written=max(_times(folder), default=0.0),
        problem="; ".join([*problems, *tail.problems]),
    )


@contextmanager
def metric_tail(folder: OpenFolder, name: str, problems: list[str]) -> Iterator[MetricTail]:
    """The end of a run's metrics. name: of the file, in what is said of its lines. A file that
    cannot be opened has no rows, and is added to problems.
    """
    try:
        file = folder.open(METRICS)
    except DataflowError as error:
        problems.append(str(error))
        file = None
    with file or nullcontext():
        yield MetricTail(file, name)


def last_row(folder: OpenFolder) -> dict[str, Any]:
    """The last Step's row, of the file's end alone; empty without any. Raises NotServed."""
    file = folder.open(METRICS)
    if file is None:
        return {}
    with file:
        return dict(MetricTail(file, METRICS).newest())


def last_reward(tail: MetricTail) -> LastValue | None:
    """The newest mean reward: of the run's one reward node, else of the first by name."""
    mean = _last(tail, "reward/", preferred="reward/mean", ends="/mean")
    return mean or _last(tail, "rows/", ends="/reward/mean")


def _last(
    tail: MetricTail, begins: str, *, preferred: str = "", but: str = "none", ends: str = ""
) -> LastValue | None:
    """The newest number of metrics that begin and end so: `preferred`, else the first by name."""
    for row in tail.rows():
        names = [name for name in row if name.startswith(begins) and name.endswith(ends)]
        names = sorted(name for name in names if not name.startswith(but))
        if names:
            if preferred in names:
                name = preferred
            else:
                name = names[0]
            return LastValue(metric=name, value=finite(row[name]), step=row["step"])
    return None


def _times(folder: OpenFolder) -> Iterator[float]:
    """When the files changed last that tell of a Step or an end."""
    marks = {name: folder.mark(name) for name in _WRITTEN}
    if marks[BEGINNING] is None:
        raise FileNotFoundError(f"{folder.name}: it was deleted")
    for mark in marks.values():
        if mark is not None:
            yield mark.mtime / 1e9


def _steps(folder: OpenFolder, path: Path, problems: list[str]) -> int | None:
    """How many Steps the options ask for."""
    try:
        content = folder.read(OPTIONS)
        if content is None:
            options = None
        else:
            options = json.loads(content)
    except (DataflowError, OSError, ValueError, RecursionError) as error:
        problems.append(f"{path / OPTIONS}: expected JSON, found {error}")
        return None
    if isinstance(options, Mapping):
        steps = options.get("steps")
    else:
        steps = None
    if isinstance(steps, int):
        return steps
    return None


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
