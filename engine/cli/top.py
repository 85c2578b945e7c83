"""`dataflow top [RUN]`: what a run does, in a terminal, while it goes on and afterwards.

Owns: which run is shown, and whether once or again and again. Does not own: what is shown
(engine/watch/top).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dataflow.width import screen_width
from engine.cli.run_lookup import find_run
from engine.cli.screen import read_flags, say


@dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions:
    """Show what a run does: who waits for whom, nodes, edges, weights, memory. On a terminal q
    quits, and r shows replicas one by one.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ""
    """A run's name or folder; by default the one that is running, or was written last."""
    root: Path = Path("runs")
    """Folder that holds run folders."""
    once: bool = False
    """Print it once, as text; so it is without a terminal."""
    replicas: bool = False
    """Show replicas one by one."""


def main(arguments: Sequence[str]) -> int:
    """Show a run; raises UsageError where there is none."""
    about = TopOptions.__doc__ or ""
    options = read_flags(TopOptions, args=arguments, prog="dataflow top", about=about)
    folder = find_run("dataflow top", options.run, options.root)
    from engine.watch.top.page import page_lines  # here: they import rich and Arrow
    from engine.watch.top.run_view import RunReader

    reader = RunReader(folder)
    if options.once or not sys.stdout.isatty():
        lines = page_lines(reader.look(), width=screen_width(100), replicas=options.replicas)
        say("\n".join(line.plain for line in lines), fold=False)
        return 0
    from engine.watch.top.live_page import watch

    try:
        watch(reader.look, replicas=options.replicas)
    except KeyboardInterrupt:  # as q
        return 0
    return 0
