"""Drawings of a graph or a Program: for a terminal, for Markdown, for Graphviz, as a picture.

Owns: the one function that makes them. Does not own: a plan's drawing (engine), any rule: a Graph
that the check would refuse can be drawn all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, get_args

from dataflow.draw.dot import dot, dot_of_program
from dataflow.draw.mermaid import mermaid, mermaid_of_program
from dataflow.draw.phases import ProgramPicture, program_picture
from dataflow.draw.picture import Picture, picture
from dataflow.draw.svg import svg, svg_of_program
from dataflow.draw.text import WIDTH as WIDTH
from dataflow.draw.text import text, text_of_program
from dataflow.errors import Fault, GraphError, nearest
from dataflow.graph import Graph
from dataflow.program import Program

Form = Literal["text", "mermaid", "dot", "svg"]

_FORMS: Mapping[str, tuple[Callable[[Picture], str], Callable[[ProgramPicture], str]]] = {
    "text": (text, text_of_program),
    "mermaid": (mermaid, mermaid_of_program),
    "dot": (dot, dot_of_program),
    "svg": (svg, svg_of_program),
}


def draw(graph: Graph | Program, form: Form = "text", *, width: int = WIDTH) -> str:
    """The graph, or each phase of a Program, as text ending in a newline. Raises GraphError for an
    unknown form.

    text: a staircase in ASCII, `width` columns wide. mermaid: a flowchart for Markdown. dot:
    Graphviz's language. svg: a picture, by an installed `dot` or by our own layout.
    """
    if form not in _FORMS:
        near = nearest(str(form), _FORMS)
        fix = f"form={near!r}" if near else f"one of: {', '.join(get_args(Form))}"
        raise GraphError(Fault(rule="call", where="draw", problem=f"no form {form!r}", fix=fix))
    of_graph, of_program = _FORMS[form]
    if form == "text":
        of_graph, of_program = partial(text, width=width), partial(text_of_program, width=width)
    if isinstance(graph, Program):
        return of_program(program_picture(graph))
    return of_graph(picture(graph))
