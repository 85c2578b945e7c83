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
_NAMED = 3
"""Metrics that only one run has and that are named."""
_PLACE = ("name", "runs", "overwrite", "progress")
"""Options of where a run is kept and what it shows, which say nothing about what it computes."""
_FIRST = ("reward/", "eval/", "loss/")
"""Beginnings of the metrics that come first."""

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
    a_label, b_label = a.name, b.name
    if a_label == b_label:
        a_label, b_label = str(a), str(b)
    one = _read_records(a, a_label)
    two = _read_records(b, b_label)
    parts = (_compare_options(one, two), _compare_metrics(one, two), _list_changes(one, two))
    sections = ["\n".join(lines) for lines in parts]
    return "\n\n".join(section for section in sections if section) + "\n"


def _read_records(folder: Path, label: str) -> RunRecords:
    options, _ = kept_options(folder)
    with reading(folder / "metrics.jsonl"):
        rows = list(recorded_rows(folder / "metrics.jsonl"))
    changes = accepted_changes(folder / CHANGES)
    return RunRecords(label=one_line(label), options=options, rows=rows, changes=changes)


class _ChangesFile(msgspec.Struct):
    changes: list[AcceptedChange]


def accepted_changes(path: Path) -> list[AcceptedChange]:
    """Read what resumes accepted as changed; nothing without the file. Raises RunError,
    GraphError.
    """
    if not path.is_file():
        return []
    try:
        return msgspec.json.decode(read_document(path), type=_ChangesFile).changes
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fix = "restore the file, or delete it"
        raise RunError(f"{path}: expected accepted changes, found {error}. Fix: {fix}.") from error


# --- options --------------------------------------------------------------------------------------


def _compare_options(a: RunRecords, b: RunRecords) -> Iterator[str]:
    differences: list[tuple[str, str, str]] = []
    for option in fields(RunOptions):
        a_value, b_value = getattr(a.options, option.name), getattr(b.options, option.name)
        if option.name not in _PLACE and a_value != b_value:
            flag = f"--{option.name.replace('_', '-')}"
            differences.append((flag, _format_option(a_value), _format_option(b_value)))
    if not differences:
        yield "Options: no difference"
        return
    yield "Options"
    yield from _align_columns([("", a.label, b.label), *differences])


def _format_option(setting: Any) -> str:
    """An option's value as its flag takes it; `-` for none."""
    words = setting
    if isinstance(words, Mapping):
        words = [f"{name}={text}" for name, text in words.items()]
    if isinstance(words, tuple | list):
        parts = (part if isinstance(part, str) else ",".join(part) for part in words)
        words = " ".join(parts)
    return "-" if words in (None, "") else one_line(str(words))


# --- metrics --------------------------------------------------------------------------------------


def _compare_metrics(a: RunRecords, b: RunRecords) -> Iterator[str]:
    a_names, b_names = _metric_names(a.rows), _metric_names(b.rows)
    common = sorted(a_names & b_names, key=_rank_metric)
    yield f"Metrics: the mean of the last {STEPS} Steps that have it; of an evaluation, the last"
    lines = [("", a.label, b.label)]
    lines.append(("step", _last_step(a.rows), _last_step(b.rows)))
    for name in common[:SHOWN]:
        lines.append((one_line(name), _format_end(a.rows, name), _format_end(b.rows, name)))
    yield from _align_columns(lines)
    if len(common) > SHOWN:
        yield f"  and {len(common) - SHOWN} more that both have"
    yield from _list_surplus(a.label, a_names - b_names)
    yield from _list_surplus(b.label, b_names - a_names)


def _metric_names(rows: Rows) -> set[str]:
    names: set[str] = set()
    for row in rows:
        names.update(row)
    return names - {"step"}


def _rank_metric(name: str) -> tuple[int, str]:
    """Where a metric comes among the others."""
    for place, beginning in enumerate(_FIRST):
        if name.startswith(beginning):
            return place, name
    return len(_FIRST), name


def _last_step(rows: Rows) -> str:
    return str(rows[-1]["step"]) if rows else "none"


def _format_end(rows: Rows, name: str) -> str:
    """A metric's end: of its last Steps, those whose number is finite."""
    last_values = [row[name] for row in rows if name in row][-STEPS:]
    # An evaluation's number is of one version, and a phase's number has no mean.
    if name.startswith(("eval/", "phase")):
        last_values = last_values[-1:]
    numbers = [finite(each) for each in last_values]
    finite_numbers = [number for number in numbers if number is not None]
    return f"{statistics.fmean(finite_numbers):.6g}" if finite_numbers else "not finite"


def _list_surplus(label: str, names: Iterable[str]) -> Iterator[str]:
    """Name the first metrics that only one run has."""
    ranked = sorted(names, key=_rank_metric)
    if not ranked:
        return
    names_shown = one_line(", ".join(ranked[:_NAMED]))
    more = ""
    if len(ranked) > _NAMED:
        more = f" and {len(ranked) - _NAMED} more"
    yield f"  only {label} has {names_shown}{more}"


# --- changes --------------------------------------------------------------------------------------


def _list_changes(a: RunRecords, b: RunRecords) -> Iterator[str]:
    if a.changes or b.changes:
        yield "Changes that a resume accepted"
    for run in (a, b):
        for change in run.changes:
            difference = ProvenanceDifference(
                where=change.where, what=change.what, old=change.old, new=change.new
            )
            yield f"  {run.label}, from step {change.step} on: {one_line(str(difference))}"


def _align_columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A line for each row, indented, its cells padded to the widest of their columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield ("  " + "  ".join(cells)).rstrip()
