"""`dataflow explain TARGET`: the plan, in words.

Owns: printing. Does not own: planning and its text (engine.plan), reading what a run measured
(engine/keep/run_measurements.py). It takes the flags of `run`, so that changing that one word is
enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataflow.width import screen_width
from engine.cli.flags import graph_and
from engine.cli.screen import say
from engine.keep.run_measurements import read_measured
from engine.plan.options import RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions(RunOptions):
    """Options of run, which a plan may depend on, and what to print beside it."""

    why: bool = False
    """The layouts that were compared, what bounds each, and why the others fell out."""
    measured: Path | None = None
    """A run folder: print its seconds, memory and bytes beside those that were predicted."""


def main(arguments: Sequence[str]) -> int:
    """Check, plan, print."""
    graph, options = graph_and(ExplainOptions, "explain", arguments)
    from engine.plan.explain import WIDTH, explain
    from engine.session.planning import plan  # here: not every command plans

    measured = None
    if options.measured is not None:
        measured = read_measured(options.measured)
    planned = plan(graph, options)
    text = explain(planned, measured=measured, why=options.why, width=screen_width(WIDTH))
    say(text, end="")
    return 0
