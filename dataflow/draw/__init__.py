"""Drawings of a graph or a Program: for a terminal, for Markdown, for Graphviz, as a picture.

Owns: the one function that makes them. Does not own: a plan's decisions and a run's figures, which
come as `placed` and `notes`; any rule: a Graph that the check would refuse can be drawn all the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from dataflow.draw.dot import dot, dot_of_program
from dataflow.draw.fold import MANY, folded
from dataflow.draw.mermaid import mermaid, mermaid_of_program
from dataflow.draw.overlay import Overlay
from dataflow.draw.phases import program_picture, with_pictures
from dataflow.draw.picture import Picture, picture
from dataflow.draw.placed import Placed as Placed
from dataflow.draw.placed import PlacedWorker as PlacedWorker
from dataflow.draw.svg import svg, svg_of_program
from dataflow.draw.text import WIDTH as WIDTH
from dataflow.draw.text import text, text_of_program
from dataflow.errors import Fault, GraphError, nearest
from dataflow.graph import Graph
from dataflow.program import Program

Form = Literal["text", "mermaid", "dot", "svg"]


def draw(
    graph: Graph | Program,
    form: Form = "text",
    *,
    width: int = WIDTH,
    life: bool = False,
    placed: Placed | Sequence[Placed] | None = None,
    notes: Mapping[str, Sequence[str]] | None = None,
    fold: bool | None = None,
) -> str:
    """The graph, or each phase of a Program, as text ending in a newline. Raises GraphError for an
    unknown form.

    text: a staircase in ASCII, `width` columns wide. mermaid: a flowchart for Markdown. dot:
    Graphviz's language. svg: a picture.

    life: an SVG that a page brings to life, with room for its figures. placed: the Workers of the
    nodes; of a Program, of each phase. notes: lines below a node's (`a`), an edge's (`a->b`; of
    weights `model->reader`) or a State's words; of a Program with the phase's number before it,
    `2/a`. fold: whether chains of nodes are one box; by default in drawings of more than 25 nodes,
    but not in text.
    """
    if form not in get_args(Form):
        near = nearest(str(form), get_args(Form))
        fix = f"form={near!r}" if near else f"one of: {', '.join(get_args(Form))}"
        raise GraphError(Fault(rule="call", where="draw", problem=f"no form {form!r}", fix=fix))
    if fold is None and form == "text":
        fold = False
    if isinstance(graph, Program):
        return _of_program(graph, form, width, fold, _overlays(graph, life, placed, notes))
    one = placed if isinstance(placed, Placed) or placed is None else placed[0]
    overlay = Overlay(life=life, placed=one, notes=notes or {})
    shown = _folded(picture(graph), overlay, fold)
    if form == "text":
        return text(shown, width, overlay)
    made = {"mermaid": mermaid, "dot": dot, "svg": svg}[form]
    return made(shown, overlay)


def _of_program(
    program: Program, form: Form, width: int, fold: bool | None, overlays: Sequence[Overlay]
) -> str:
    whole = program_picture(program)
    pairs = zip(whole.phases, overlays, strict=True)
    shown = with_pictures(whole, [_folded(phase.picture, o, fold) for phase, o in pairs])
    if form == "text":
        return text_of_program(shown, width, overlays)
    made = {"mermaid": mermaid_of_program, "dot": dot_of_program, "svg": svg_of_program}[form]
    return made(shown, overlays)


def _overlays(
    program: Program,
    life: bool,
    placed: Placed | Sequence[Placed] | None,
    notes: Mapping[str, Sequence[str]] | None,
) -> list[Overlay]:
    """What each phase shows beyond its graph."""
    count = len(program.phases)
    places = [placed] * count if isinstance(placed, Placed) or placed is None else list(placed)
    return [
        Overlay(life=life, placed=place, notes=_of_phase(notes or {}, number))
        for number, place in enumerate(places, start=1)
    ]


def _of_phase(notes: Mapping[str, Sequence[str]], number: int) -> dict[str, Sequence[str]]:
    mark = f"{number}/"
    return {k.removeprefix(mark): lines for k, lines in notes.items() if k.startswith(mark)}


def _folded(shown: Picture, overlay: Overlay, fold: bool | None) -> Picture:
    if fold is None:
        fold = len(shown.boxes) > MANY
    return folded(shown, overlay.placed) if fold else shown
