"""Drawings of a graph or a Program: for a terminal, for Markdown, for Graphviz, as a picture.

Owns: the one function that makes them. Does not own: a plan's decisions and a run's figures, which
come as `placed` and `notes`; any rule: a Graph that the check would refuse can be drawn all the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from dataflow.draw.dot import draw_dot, draw_program_dot
from dataflow.draw.fold import MANY, fold_chains
from dataflow.draw.mermaid import draw_mermaid, draw_program_mermaid
from dataflow.draw.node_places import Placed as Placed
from dataflow.draw.node_places import PlacedWorker as PlacedWorker
from dataflow.draw.overlay import Overlay
from dataflow.draw.phases import program_picture
from dataflow.draw.picture import Picture, make_picture
from dataflow.draw.svg import draw_program_svg, draw_svg
from dataflow.draw.text import WIDTH as WIDTH
from dataflow.draw.text import draw_program_text, draw_text
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
    """Draw the graph, or each phase of a Program, as text ending in a newline. Raises GraphError
    for an unknown form.

    text: a staircase in ASCII, `width` columns wide. mermaid: a flowchart for Markdown. dot:
    Graphviz's language. svg: a picture.

    life: an SVG that a page brings to life, with room for its figures. placed: the Workers of the
    nodes; of a Program, of each phase. notes: lines below a node's (`a`), an edge's (`a->b`; of
    weights `model->reader`) or a State's words; of a Program with the phase's number before it,
    `2/a`. fold: whether chains of nodes are one box; by default in drawings of more than 25 nodes,
    but not in text.
    """
    _require_form(form)
    if fold is None and form == "text":
        fold = False
    overlays = _make_overlays(graph, life, placed, notes or {})
    pictures: list[Picture] = []
    for phase, overlay in zip(graph.phases, overlays, strict=True):
        pictures.append(_fold_if_large(make_picture(phase.graph), overlay, fold))
    if isinstance(graph, Program):
        return _draw_program(graph, pictures, overlays, form, width)
    match form:
        case "text":
            return draw_text(pictures[0], width, overlays[0])
        case "mermaid":
            return draw_mermaid(pictures[0], overlays[0])
        case "dot":
            return draw_dot(pictures[0], overlays[0])
        case "svg":
            return draw_svg(pictures[0], overlays[0])


def _require_form(form: str) -> None:
    """Raise GraphError for an unknown form."""
    if form in get_args(Form):
        return
    near = nearest(str(form), get_args(Form))
    fix = f"one of: {', '.join(get_args(Form))}"
    if near:
        fix = f"form={near!r}"
    raise GraphError(Fault(rule="call", where="draw", problem=f"no form {form!r}", fix=fix))


def _draw_program(
    program: Program,
    pictures: Sequence[Picture],
    overlays: Sequence[Overlay],
    form: Form,
    width: int,
) -> str:
    """Draw the phases' pictures with their headings, and arrows for the weights that go on."""
    picture = program_picture(program, pictures)
    match form:
        case "text":
            return draw_program_text(picture, width, overlays)
        case "mermaid":
            return draw_program_mermaid(picture, overlays)
        case "dot":
            return draw_program_dot(picture, overlays)
        case "svg":
            return draw_program_svg(picture, overlays)


def _make_overlays(
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
        phase_notes = _select_notes(notes, number)
        overlays.append(Overlay(life=life, placed=place, notes=phase_notes))
    return overlays


def _select_notes(notes: Mapping[str, Sequence[str]], number: int) -> dict[str, Sequence[str]]:
    """The notes of a phase by their names there; all of a graph alone, whose names have no mark."""
    mark = numbered_name(number, "")
    phase_notes: dict[str, Sequence[str]] = {}
    for name, lines in notes.items():
        if name.startswith(mark):
            phase_notes[name.removeprefix(mark)] = lines
    return phase_notes


def _fold_if_large(picture: Picture, overlay: Overlay, fold: bool | None) -> Picture:
    """Fold chains as asked; where nobody says, in a picture of many nodes."""
    if fold is None:
        fold = len(picture.boxes) > MANY
    return fold_chains(picture, overlay.placed) if fold else picture
