"""`dataflow run TARGET`: run a graph from its beginning.

Owns: what is printed at the end, the flag --watch. Does not own: the run (engine.session.calls),
the options (engine.plan.options), the page (watch.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dataflow.check import AnyChecked, check
from dataflow.program import AnyGraph
from engine.cli.flags import graph_and, without_own_flags
from engine.cli.screen import say
from engine.cli.target import is_received, run_folder
from engine.cli.watch import watching
from engine.keep.untrusted_files import reading
from engine.plan.options import RunOptions
from engine.run.loop.signals import code, ending_command

if TYPE_CHECKING:
    from engine.session.calls import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRunOptions(RunOptions):
    """How the run is run; the graph's own parameters say what it computes."""

    TITLE: ClassVar[str] = "run"
    watch: bool = False
    """Serve a page that shows the run (dataflow watch), until it ends."""


def main(arguments: Sequence[str]) -> int:
    """Run; raises what made the run fail."""
    with ending_command():
        graph, watched_options = graph_and(WatchedRunOptions, "run", arguments)
        options = without_own_flags(watched_options)
        from engine.session.calls import run  # here: it imports what runs kernels

        target = arguments[0]
        if folder := run_folder(target):
            say(f"a new run; dataflow resume {folder} goes on with the old one")
        with watching(options.runs, options.name or graph.name, wanted=watched_options.watch):
            if is_received(target):
                return print_end(run(_check_received(graph, target), options))
            return print_end(run(graph, options))


def _check_received(graph: AnyGraph, text: str) -> AnyChecked:
    """Check what a file says, within the limits for such files. Raises GraphError with every
    fault.
    """
    with reading(text):
        return check(graph)


def print_end(ended_run: Result) -> int:
    """Print how the run ended; returns the exit code, after a signal 128 and its number."""
    try:
        say(describe_end(ended_run))
        sys.stdout.flush()
    except OSError:
        # The reader is gone, as after a Ctrl-C that reached `| tee` too; nothing follows this.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if ended_run.signal:
        return code(ended_run.signal)
    return 0


def describe_end(ended_run: Result) -> str:
    """Say how a run ended, and where its things are."""
    lines = [f"{ended_run.reason}: step {ended_run.step}", f"run folder  {ended_run.folder}"]
    lines += [f"{name}  {folder}" for name, folder in ended_run.trained.items()]
    for name, folders in ended_run.best.items():
        lines += [f"best by {name}  {folder}" for folder in folders]
    if ended_run.interrupted:
        lines.append(f"go on with  dataflow resume {ended_run.folder}")
    return "\n".join(lines)
