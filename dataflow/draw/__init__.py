"""Drawings of a graph: for a terminal, for Markdown, for Graphviz, as a picture.

Owns: the one function that makes them. Does not own: a plan's drawing (engine), any rule: a Graph
that the check would refuse can be drawn all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

from dataflow.draw.dot import dot
from dataflow.draw.mermaid import mermaid
from dataflow.draw.picture import Picture, picture
from dataflow.draw.svg import svg
from dataflow.draw.text import text
from dataflow.errors import Fault, GraphError, nearest
from dataflow.graph import Graph

Form = Literal["text", "mermaid", "dot", "svg"]

_FORMS: Mapping[str, Callable[[Picture], str]] = {
    "text": text,
    "mermaid": mermaid,
    "dot": dot,
    "svg": svg,
}


def draw(graph: Graph, form: Form = "text") -> str:
    """The graph as text, ending in a newline. Raises GraphError for an unknown form.

    text: a staircase in ASCII. mermaid: a flowchart for Markdown. dot: Graphviz's language. svg: a
    picture, by an installed `dot` or by our own layout.
    """
    if form not in _FORMS:
        near = nearest(str(form), _FORMS)
        fix = f"form={near!r}" if near else f"one of: {', '.join(get_args(Form))}"
        raise GraphError(Fault(rule="call", where="draw", problem=f"no form {form!r}", fix=fix))
    return _FORMS[form](picture(graph))
