"""`dataflow runs [FOLDER]`: the run folders there, how far each is, and how it ended.

Owns: the table and its JSON. Does not own: what a run folder tells
(engine/keep/reader/run_summary.py).
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dataflow.safe_text import one_line, shown_bytes, shown_number
from dataflow.width import pack_parts, screen_width
from engine.cli.screen import read_flags, say
from engine.cli.target import UsageError
from engine.keep.reader.run_state import NO_WORD
from engine.keep.reader.run_summary import LastValue, RunSummary, read_summaries

_TITLES: tuple[str, ...] = ("run", "state", "steps", "reward", "eval", "loss", "size", "written")
_NOTHING = "-"
"""A cell of which nothing is known."""
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsOptions:
    """List run folders, the last written first: how far each is, and how it ended.

    state: running, finished, interrupted (by a signal), failed, or "ended without a word": no
    process holds the folder, and no record says how the run ended, as after a kill.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """Folder that holds run folders, or one of them."""
    json: bool = False
    """Print the same as JSON, with the metrics' names and the reason of each end."""


def main(arguments: Sequence[str]) -> int:
    """Print the list; raises UsageError for a folder that is not there or cannot be read."""
    about = RunsOptions.__doc__ or ""
    options = read_flags(RunsOptions, args=arguments, prog="dataflow runs", about=about)
    folder = options.folder
    try:
        runs, others = read_summaries(folder)
    except OSError as error:
        problem = f"{str(folder)[:80]!r} cannot be read: {error.strerror}"
        fix = "dataflow runs FOLDER, a folder with run folders in it"
        raise UsageError("dataflow runs", problem, fix) from error
    if options.json:
        say(json.dumps([asdict(run) for run in runs], indent=1))
        return 0
    if runs:
        lines = list_runs(runs, now=time.time(), wide=screen_width(sys.maxsize))
        say("\n".join(lines))
    else:
        say(f"no runs in {folder}")
    if others == 1:
        say(f"1 other folder in {folder}")
    elif others:
        say(f"{others} other folders in {folder}")
    return 0


def list_runs(runs: Sequence[RunSummary], *, now: float, wide: int) -> Iterator[str]:
    """Write a row for each run; where the rows would be wider than that, two lines for each."""
    table = [_TITLES]
    for run in runs:
        table.append(_cells(run, now))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) <= wide:
        for row in table:
            cells = zip(row, widths, strict=True)
            yield "  ".join(cell.ljust(width) for cell, width in cells).rstrip()
    else:
        for name, state, *cells in table[1:]:
            yield name[:wide]
            facts = [f"  {state}"]
            for title, cell in zip(_TITLES[2:], cells, strict=True):
                if cell != _NOTHING:
                    facts.append(f"{title} {cell}")
            yield from pack_parts(facts, wide, indent="  ")
    for note in _notes(runs):
        yield from textwrap.wrap(note, wide)


def _notes(runs: Sequence[RunSummary]) -> Iterator[str]:
    """Say what no cell has room for."""
    for run in runs:
        if run.state == "failed":
            yield f"{one_line(run.name)} failed: {one_line(run.reason)}"
        if run.problem:
            yield f"{one_line(run.name)}: {one_line(run.problem)}"
    if any(run.state == NO_WORD for run in runs):
        yield f"{NO_WORD}: no process holds the folder, and nothing in it says how the run ended"


def _cells(run: RunSummary, now: float) -> tuple[str, ...]:
    """Write the cells of a run's row."""
    steps = f"{run.step}"
    if run.steps is not None:
        steps += f"/{run.steps}"
    if run.phase:
        steps += f" (phase {run.phase})"
    age = _NOTHING
    if run.written:
        age = f"{_age(max(0.0, now - run.written))} ago"
    return (
        one_line(run.name),
        run.state,
        steps,
        _number(run.reward),
        _number(run.evaluation),
        _number(run.loss),
        shown_bytes(run.nbytes),
        age,
    )


def _number(last: LastValue | None) -> str:
    if last is None:
        return _NOTHING
    if last.value is None:
        return "not finite"
    return shown_number(last.value, 4)


def _age(seconds: float) -> str:
    """`3 d`, `12 min`: in the largest unit that it has one of."""
    whole = math.floor(seconds)
    for unit_seconds, unit in _AGES:
        if whole >= unit_seconds:
            return f"{whole // unit_seconds} {unit}"
    return f"{whole} s"
