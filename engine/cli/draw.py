"""`dataflow draw TARGET`: a drawing on the screen or in a file.

Owns: the command's options. Does not own: any drawing (dataflow.draw), what of a plan or a run is
drawn (engine/plan/drawing.py, engine/watch/flow_drawing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataflow.draw import WIDTH, Form, Placed, draw
from dataflow.program import AnyGraph
from dataflow.storage import write_to_user_path
from dataflow.width import screen_width
from engine.cli.flags import graph_and
from engine.cli.screen import say
from engine.cli.target import UsageError
from engine.plan.drawing import Notes, places, planned_notes
from engine.plan.options import RunOptions
from engine.watch.flow_drawing import measured_notes

_ENDINGS: dict[str, Form] = {
    ".txt": "text",
    ".mmd": "mermaid",
    ".md": "mermaid",
    ".dot": "dot",
    ".gv": "dot",
    ".svg": "svg",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions(RunOptions):
    """Draw a graph; a wrong one too. The options of run count with --plan."""

    form: Form | None = None
    """Text, Mermaid, DOT or SVG; by the ending of --out where it has one, else text."""
    out: Path | None = None
    """File to write; the screen by default."""
    plan: bool = False
    """Put nodes on their Workers and devices, with the memory and seconds that are planned."""
    measured: Path | None = None
    """A run folder: put its figures on nodes and edges."""


def main(arguments: Sequence[str]) -> int:
    """Draw what TARGET makes."""
    graph, options = graph_and(DrawOptions, "draw", arguments)
    form = options.form or _form_of(options.out)
    placed: list[Placed] | None = None
    notes: Notes = {}
    if options.plan:
        placed, notes = _place_nodes(graph, options)
    if options.measured is not None:
        for name, lines in measured_notes(options.measured).items():
            notes[name] = (*notes.get(name, ()), *lines)
    if options.out is None:
        drawing = draw(graph, form, width=screen_width(WIDTH), placed=placed, notes=notes)
        say(drawing, end="", fold=False)
    else:
        drawing = draw(graph, form, placed=placed, notes=notes)
        write_to_user_path("the drawing", options.out, drawing)
        say(f"{form} of {graph.name} in {options.out}")
    return 0


def _form_of(out: Path | None) -> Form:
    """Choose the form by the ending of the file. Raises UsageError for an ending that has none."""
    if out is None:
        return "text"
    if out.suffix not in _ENDINGS:
        problem = f"{out} has no ending of {', '.join(_ENDINGS)}"
        raise UsageError("dataflow draw", problem, "give --form too")
    return _ENDINGS[out.suffix]


def _place_nodes(graph: AnyGraph, options: RunOptions) -> tuple[list[Placed], Notes]:
    """Plan the graph; returns the places of its nodes, and what is planned of each."""
    from engine.session.planning import plan  # here: not every command plans

    planned = plan(graph, options)
    return places(planned), planned_notes(planned)
