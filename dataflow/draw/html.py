"""Pieces of a notebook's page: tables, pictures, texts; all words escaped.

Owns: HTML syntax. Does not own: what is worth showing (pages.py), pictures (svg.py, chart.py).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from dataflow.safe_text import one_line, printable

_CELL = "text-align:left;vertical-align:top;padding:2px 10px"


def write_heading(title: str) -> str:
    """A line that names what follows."""
    return f"<div><b>{escape(one_line(title))}</b></div>"


def write_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; its cells are shown as `str` gives them."""
    head = "".join(map(_write_head, heads))
    body = ""
    for row in rows:
        line = "".join(map(_write_cell, row))
        body += f"<tr>{line}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _write_head(head: str) -> str:
    return f'<th style="{_CELL}">{escape(one_line(head))}</th>'


def _write_cell(cell: object) -> str:
    return f'<td style="{_CELL}">{escape(one_line(str(cell)))}</td>'


def write_image(svg: str, name: str) -> str:
    """An SVG as an image of its own, so that pictures on one page share no names. name: in words,
    for those who cannot see it.
    """
    encoded = base64.b64encode(svg.encode()).decode()
    source = f"data:image/svg+xml;base64,{encoded}"
    return f'<img alt="{escape(name)}" style="max-width:100%" src="{source}"/>'


def write_lines(words: str) -> str:
    """Lines of text as they are."""
    return f'<pre style="margin:4px 0">{escape(printable(words))}</pre>'


def write_details(title: str, inside: str) -> str:
    """A title that opens what is inside when it is clicked."""
    return f"<details><summary>{escape(one_line(title))}</summary>{inside}</details>"
