"""Two runs compared by what their folders keep: options, the ends of their metrics, changes.

Owns: what is compared, and its text. Does not own: the comparison of their graphs
(dataflow/program_diff.py), the files (engine/keep/, engine/session/run_beginning.py). It also reads
runs that were killed or still go on.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from dataflow.errors import RunError
from dataflow.safe_text import one_line
from engine.keep.checkpoint.provenance import AcceptedChange, ProvenanceDifference
from engine.keep.metrics.metric_lines import finite, recorded_rows
from engine.keep.untrusted_files import kept_options, read_document, reading
from engine.plan.options import RunOptions
from engine.session.run_beginning import CHANGES

STEPS = 10
"""Steps at the end of a run whose mean is compared."""
SHOWN = 20
"""Metrics that are shown; the rest is counted."""
_PLACE = ("name", "runs", "overwrite", "progress")
"""Options of where a run is kept and what it shows, which say nothing about what it computes."""
_FIRST = ("reward/", "eval/", "loss/")

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """What is compared of a run. label: its column's title."""

    label: str
    options: RunOptions
    rows: Rows
    changes: Sequence[AcceptedChange]


def run_differences(a: Path, b: Path) -> str:
    """The text that `dataflow diff` prints below the graphs. Raises RunError, GraphError, DataError
    for what is missing or damaged; a last line of metrics that is half written is left out.
    """
    named = a.name != b.name
    one, two = (_records(path, path.name if named else str(path)) for path in (a, b))
    parts = [_options(one, two), _metrics(one, two), _changes(one, two)]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines) + "\n"


def _records(folder: Path, label: str) -> RunRecords:
    options, _ = kept_options(folder)
    with reading(folder / "metrics.jsonl"):
        rows = list(recorded_rows(folder / "metrics.jsonl"))
    changes = accepted_changes(folder / CHANGES)
    return RunRecords(label=one_line(label), options=options, rows=rows, changes=changes)


class _Kept(msgspec.Struct):
    changes: list[AcceptedChange]


def accepted_changes(path: Path) -> list[AcceptedChange]:
    """What resumes accepted as changed; empty without the file. Raises RunError, GraphError."""
    if not path.is_file():
        return []
    try:
        return msgspec.json.decode(read_document(path), type=_Kept).changes
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fix = "restore the file, or delete it"
        raise RunError(f"{path}: expected accepted changes, found {error}. Fix: {fix}.") from error


def _options(a: RunRecords, b: RunRecords) -> Iterator[str]:
    names = [f.name for f in fields(RunOptions) if f.name not in _PLACE]
    values = ((n, getattr(a.options, n), getattr(b.options, n)) for n in names)
    found = [
        (f"--{name.replace('_', '-')}", _flag(was), _flag(now))
        for name, was, now in values
        if was != now
    ]
    yield "Options" if found else "Options: no difference"
    yield from _table([("", a.label, b.label), *found]) if found else ()


def _flag(value: Any) -> str:
    """An option's value as its flag takes it; `-` for none."""
    if isinstance(value, Mapping):
        value = [f"{name}={text}" for name, text in value.items()]
    if isinstance(value, tuple | list):
        value = " ".join(part if isinstance(part, str) else ",".join(part) for part in value)
    return "-" if value in (None, "") else one_line(str(value))


def _metrics(a: RunRecords, b: RunRecords) -> Iterator[str]:
    names = [{name for row in run.rows for name in row} - {"step"} for run in (a, b)]
    both = sorted(names[0] & names[1], key=_order)
    yield f"Metrics: the mean of the last {STEPS} Steps that have it; of an evaluation, the last"
    steps = ("step", *(str(run.rows[-1]["step"]) if run.rows else "none" for run in (a, b)))
    shown = [(one_line(n), _end(a.rows, n), _end(b.rows, n)) for n in both[:SHOWN]]
    yield from _table([("", a.label, b.label), steps, *shown])
    if len(both) > SHOWN:
        yield f"  and {len(both) - SHOWN} more that both have"
    for run, own, other in ((a, *names), (b, *reversed(names))):
        if only := sorted(own - other, key=_order):
            more = f" and {len(only) - 3} more" if len(only) > 3 else ""
            yield f"  only {run.label} has {one_line(', '.join(only[:3]))}{more}"


def _order(name: str) -> tuple[int, str]:
    place = next((i for i, begins in enumerate(_FIRST) if name.startswith(begins)), len(_FIRST))
    return place, name


def _end(rows: Rows, name: str) -> str:
    """A metric's end: of its last Steps, those whose number is finite."""
    last = [row[name] for row in rows if name in row]
    last = last[-1:] if name.startswith(("eval/", "phase")) else last[-STEPS:]
    known = [number for value in last if (number := finite(value)) is not None]
    return f"{statistics.fmean(known):.6g}" if known else "not finite"


def _changes(a: RunRecords, b: RunRecords) -> Iterator[str]:
    if a.changes or b.changes:
        yield "Changes that a resume accepted"
    for run in (a, b):
        for each in run.changes:
            told = ProvenanceDifference(
                where=each.where, what=each.what, old=each.old, new=each.new
            )
            yield f"  {run.label}, from step {each.step} on: {one_line(str(told))}"


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = zip(row, widths, strict=True)
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in cells)).rstrip()
