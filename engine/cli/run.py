"""`dataflow run TARGET`: run a graph from its beginning.

Owns: what is printed at the end, the flag --watch. Does not own: the run (engine.session.calls),
the options (engine.plan.options), the page (watch.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from dataflow.check import AnyChecked, check
from dataflow.program import AnyGraph
from engine.cli.flags import graph_and
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

    def of_run(self) -> RunOptions:
        """Those that the run keeps."""
        return RunOptions(**{f.name: getattr(self, f.name) for f in fields(RunOptions)})


def main(arguments: Sequence[str]) -> int:
    """Run; raises what made the run fail."""
    with ending_command():
        graph, watched_options = graph_and(WatchedRunOptions, "run", arguments)
        options = watched_options.of_run()
        from engine.session.calls import run  # here: it imports what runs kernels

        received = is_received(arguments[0])
        if folder := run_folder(arguments[0]):
            say(f"a new run; dataflow resume {folder} goes on with the old one")
        with watching(options.runs, options.name or graph.name, wanted=watched_options.watch):
            return ended(run(checked(graph, arguments[0]) if received else graph, options))


def checked(graph: AnyGraph, text: str) -> AnyChecked:
    """Check what a file says. Raises GraphError with every fault."""
    with reading(text):
        return check(graph)


def ended(result: Result) -> int:
    """Print how the run ended; returns the exit code, after a signal 128 and its number."""
    try:
        say(told(result))
        sys.stdout.flush()
    except OSError:
        # The reader is gone, as after a Ctrl-C that reached `| tee` too; nothing follows this.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code(result.signal) if result.signal else 0


def told(result: Result) -> str:
    """How a run ended, and where its things are."""
    lines = [f"{result.reason}: step {result.step}", f"run folder  {result.folder}"]
    lines += [f"{name}  {folder}" for name, folder in result.trained.items()]
    for name, folders in result.best.items():
        lines += [f"best by {name}  {folder}" for folder in folders]
    lines += [f"go on with  dataflow resume {result.folder}"] if result.interrupted else []
    return "\n".join(lines)
