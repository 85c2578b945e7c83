"""`dataflow check TARGET`: prove that a graph can be run, and draw it.

Owns: what the command prints. Does not own: any rule (dataflow.check).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataflow.check import check
from dataflow.draw import WIDTH, draw
from dataflow.errors import GraphError
from dataflow.width import screen_width
from engine.cli.flags import graph_and
from engine.cli.screen import say


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Prove that a graph can be run, and draw it; reads no weights."""

    strict: bool = False
    """Make warnings errors."""


def main(arguments: Sequence[str]) -> int:
    """Print the drawing and what was found; raises GraphError (--strict: for warnings too)."""
    graph, options = graph_and(CheckOptions, "check", arguments)
    checked = check(graph)
    if options.strict and checked.warnings:
        raise GraphError(checked.warnings)
    say(draw(graph, width=screen_width(WIDTH)), fold=False)
    say(checked.describe())
    return 0
