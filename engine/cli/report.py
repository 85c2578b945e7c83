"""`dataflow report RUN`: what a run did, as one HTML file to send to somebody.

Owns: the command's options. Does not own: what is in the file (engine/watch/report.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dataflow.storage import write_to_user_path
from engine.cli.run_lookup import find_run
from engine.cli.screen import read_flags, say


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Write what a run did as one HTML file: its graph, how it ended, curves, who waited for whom,
    estimates beside what was measured, samples, errors. It needs nothing else and asks nobody.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's name or folder; of a run that goes on, what it has done so far."""
    root: Path = Path("runs")
    """Folder that holds run folders."""
    out: Path | None = None
    """File to write; NAME.html by default."""


def main(arguments: Sequence[str]) -> int:
    """Write the file; raises UsageError where there is no such run."""
    about = ReportOptions.__doc__ or ""
    options = read_flags(ReportOptions, args=arguments, prog="dataflow report", about=about)
    folder = find_run("dataflow report", options.run, options.root).resolve()
    from engine.watch.report import make_report
    from engine.watch.run_questions import ServedRuns

    out = options.out or Path(f"{folder.name}.html")
    text = make_report(ServedRuns(folder.parent), folder.name, now=time.time())
    write_to_user_path("the report", out, text)
    say(f"report of {folder.name} in {out}")
    return 0
