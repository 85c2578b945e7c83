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
from dataflow.draw.node_places import Placed as Placed
from dataflow.draw.node_places import PlacedWorker as PlacedWorker
from dataflow.draw.overlay import Overlay
from dataflow.draw.phases import program_picture
from dataflow.draw.picture import Picture, picture
from dataflow.draw.svg import svg, svg_of_program
from dataflow.draw.text import WIDTH as WIDTH
from dataflow.draw.text import text, text_of_program
from dataflow.errors import Fault, GraphError, nearest
from dataflow.graph import Graph
from dataflow.program import AnyGraph, Program, numbered_name

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
    overlays = _overlays(graph, life, placed, notes or {})
    pairs = zip(graph.phases, overlays, strict=True)
    pictures = [_folded(picture(phase.graph), overlay, fold) for phase, overlay in pairs]
    if isinstance(graph, Program):
        return _draw_program(graph, pictures, overlays, form, width)
    if form == "text":
        return text(pictures[0], width, overlays[0])
    write = {"mermaid": mermaid, "dot": dot, "svg": svg}[form]
    return write(pictures[0], overlays[0])


def _draw_program(
    program: Program,
    pictures: Sequence[Picture],
    overlays: Sequence[Overlay],
    form: Form,
    width: int,
) -> str:
    """The phases' pictures with their headings, and arrows for the weights that go on."""
    shown = program_picture(program, pictures)
    if form == "text":
        return text_of_program(shown, width, overlays)
    write = {"mermaid": mermaid_of_program, "dot": dot_of_program, "svg": svg_of_program}[form]
    return write(shown, overlays)


def _overlays(
    graph: AnyGraph,
    life: bool,
    placed: Placed | Sequence[Placed] | None,
    notes: Mapping[str, Sequence[str]],
) -> list[Overlay]:
    """What each phase shows beyond its graph."""
    places: Sequence[Placed | None] = [None] * len(graph.phases)
    if isinstance(placed, Placed):
        places = [placed] * len(graph.phases)
    elif placed is not None:
        places = placed
    overlays: list[Overlay] = []
    for number, place in zip(graph.numbers, places, strict=True):
        overlays.append(Overlay(life=life, placed=place, notes=_of_phase(notes, number)))
    return overlays


def _of_phase(notes: Mapping[str, Sequence[str]], number: int) -> dict[str, Sequence[str]]:
    mark = numbered_name(number, "")
    return {k.removeprefix(mark): lines for k, lines in notes.items() if k.startswith(mark)}


def _folded(shown: Picture, overlay: Overlay, fold: bool | None) -> Picture:
    if fold is None:
        fold = len(shown.boxes) > MANY
    return folded(shown, overlay.placed) if fold else shown
