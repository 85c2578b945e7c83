"""What a graph, a Program and a batch show in a notebook.

Owns: a page for each. Does not own: drawings (svg.py), HTML (html.py), the pages of plans and runs
(engine/session/notebook_pages.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.batch import Batch
from dataflow.check import AnyChecked
from dataflow.conversation import MESSAGES, read_conversation
from dataflow.draw import draw
from dataflow.draw.html import write_heading, write_image, write_lines, write_table
from dataflow.program import AnyGraph
from dataflow.safe_text import shown_bytes

_ROWS = 10
"""Rows of a batch that are shown."""
_LETTERS = 100
"""Of a cell."""
_ITEMS = 6
"""Of a list in a cell."""


def draw_image(source: AnyGraph) -> str:
    """The drawing, which anything that is wrong leaves possible."""
    return write_image(draw(source, "svg"), f"drawing of {source!r}")


def graph_page(graph: AnyGraph) -> str:
    """The drawing."""
    return draw_image(graph)


def checked_page(checked: AnyChecked) -> str:
    """The drawing, and what the check found."""
    return draw_image(checked.source) + write_lines(checked.describe())


def batch_page(batch: Batch) -> str:
    """The columns' types and the first rows."""
    title = write_heading(f"{len(batch)} rows, {shown_bytes(batch.nbytes)}")
    more = len(batch) - _ROWS
    rest = write_lines(f"... {more} more rows") if more > 0 else ""
    types = {field.name: field.type for field in batch.records.schema}
    heads = ["position", "sample", *(f"{name}: {types[name]}" for name in batch.names)]
    return title + write_table(heads, _format_rows(batch)) + rest


def _format_rows(batch: Batch) -> Iterator[list[str]]:
    first_rows = batch.records.slice(0, _ROWS).to_pylist()
    for (position, sample, _), row in zip(batch.keys.rows(), first_rows, strict=False):
        cells = [_format_column(name, row[name]) for name in batch.names]
        yield [str(position), str(sample), *cells]


def _format_column(name: str, cell: object) -> str:
    """A cell in a few letters; of an episode's conversation how long it is, and how it ended."""
    conversation = None
    if name == MESSAGES:
        conversation = read_conversation(cell)
    if not conversation:
        return _format_cell(cell)
    last = conversation[-1]
    return _format_item(f"{len(conversation)} messages, the last: {last.who}: {last}")


def _format_cell(cell: object) -> str:
    """A cell in a few letters; a long list by its first items and its length."""
    if isinstance(cell, list) and len(cell) > _ITEMS:
        first_items = ", ".join(map(_format_item, cell[:_ITEMS]))
        return f"[{first_items}, ...] ({len(cell)})"
    return _format_item(cell)


def _format_item(item: object) -> str:
    words = f"{item:.4g}" if isinstance(item, float) else str(item)
    if len(words) <= _LETTERS:
        return words
    return f"{words[:_LETTERS]}..."
