"""Pieces of a notebook's page: tables, pictures, texts; all words escaped.

Owns: HTML syntax. Does not own: what is worth showing (pages.py), pictures (svg.py, chart.py).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from dataflow.safe_text import one_line, printable

_CELL = "text-align:left;vertical-align:top;padding:2px 10px"


def heading(text: str) -> str:
    """A line that names what follows."""
    return f"<div><b>{escape(one_line(text))}</b></div>"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; its cells are shown as `str` gives them."""
    head = "".join(f'<th style="{_CELL}">{escape(one_line(h))}</th>' for h in heads)
    lines = ["".join(map(_cell, row)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    return f'<td style="{_CELL}">{escape(one_line(str(value)))}</td>'


def picture(svg: str, name: str) -> str:
    """An SVG as an image of its own, so that pictures on one page share no names. name: in words,
    for those who cannot see it.
    """
    data = base64.b64encode(svg.encode()).decode()
    style = "max-width:100%"
    return f'<img alt="{escape(name)}" style="{style}" src="data:image/svg+xml;base64,{data}"/>'


def text(words: str) -> str:
    """Lines of text as they are."""
    return f'<pre style="margin:4px 0">{escape(printable(words))}</pre>'


def folded(title: str, inside: str) -> str:
    """A title that opens what is inside when it is clicked."""
    return f"<details><summary>{escape(one_line(title))}</summary>{inside}</details>"
