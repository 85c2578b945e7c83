"""`dataflow explain TARGET`: the plan, in words.

Owns: nothing but the printing. Does not own: planning and its text (engine.plan).

It takes the flags of `run`, so that one word of a command line turns into the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.cli.flags import graph_and
from engine.options import RunOptions


def main(arguments: Sequence[str]) -> int:
    """Check, plan, print."""
    graph, options = graph_and(RunOptions, "explain", "dataflow explain TARGET [flags]", arguments)
    from engine.api import plan  # here: it imports what runs kernels
    from engine.plan.explain import explain

    print(explain(plan(graph, options)))
    return 0
