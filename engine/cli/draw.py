"""`dataflow draw TARGET`: a drawing on the screen or in a file.

Owns: the command's options. Does not own: any drawing (dataflow.draw).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataflow.draw import WIDTH, Form, draw
from dataflow.storage import write_where_asked
from dataflow.width import screen_width
from engine.cli.flags import graph_and
from engine.cli.screen import say
from engine.cli.target import UsageError

_ENDINGS: dict[str, Form] = {
    ".txt": "text",
    ".mmd": "mermaid",
    ".md": "mermaid",
    ".dot": "dot",
    ".gv": "dot",
    ".svg": "svg",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """Draw a graph; a wrong one too."""

    form: Form | None = None
    """Text, Mermaid, DOT or SVG; by the ending of --out where it has one, else text."""
    out: Path | None = None
    """File to write; the screen by default."""


def main(arguments: Sequence[str]) -> int:
    """Draw what TARGET makes."""
    graph, options = graph_and(DrawOptions, "draw", arguments)
    form = options.form or (_ENDINGS.get(options.out.suffix) if options.out else "text")
    if form is None:
        problem = f"{options.out} has no ending of {', '.join(_ENDINGS)}"
        raise UsageError("dataflow draw", problem, "give --form too")
    if options.out is None:
        say(draw(graph, form, width=screen_width(WIDTH)), end="", fold=False)
    else:
        write_where_asked("the drawing", options.out, draw(graph, form))
        say(f"{form} of {graph.name} in {options.out}")
    return 0
