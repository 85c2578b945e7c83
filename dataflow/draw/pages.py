"""What a graph, a Program and a batch show in a notebook.

Owns: a page for each. Does not own: drawings (svg.py), HTML (html.py), the pages of plans and runs
(engine/session/notebook_pages.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.batch import Batch
from dataflow.check import AnyChecked
from dataflow.draw import draw
from dataflow.draw.html import heading, picture, table, text
from dataflow.program import AnyGraph
from dataflow.safe_text import shown_bytes

_ROWS = 10
_LETTERS = 100
_ITEMS = 6


def drawn(source: AnyGraph) -> str:
    """The drawing, which anything that is wrong leaves possible."""
    return picture(draw(source, "svg"), f"drawing of {source!r}")


def graph_page(graph: AnyGraph) -> str:
    """The drawing."""
    return drawn(graph)


def checked_page(checked: AnyChecked) -> str:
    """The drawing, and what the check found."""
    return drawn(checked.source) + text(checked.describe())


def batch_page(batch: Batch) -> str:
    """The columns' types and the first rows."""
    title = heading(f"{len(batch)} rows, {shown_bytes(batch.nbytes)}")
    more = len(batch) - _ROWS
    rest = text(f"... {more} more rows") if more > 0 else ""
    types = {field.name: field.type for field in batch.records.schema}
    heads = ["position", "sample", *(f"{name}: {types[name]}" for name in batch.names)]
    return title + table(heads, _rows(batch)) + rest


def _rows(batch: Batch) -> Iterator[list[str]]:
    first = batch.records.slice(0, _ROWS).to_pylist()
    for (position, sample, _), row in zip(batch.keys.rows(), first, strict=False):
        yield [str(position), str(sample), *(_value(row[name]) for name in batch.names)]


def _value(value: object) -> str:
    """A value in a few letters; a long list by its first items and its length."""
    if isinstance(value, list) and len(value) > _ITEMS:
        items = ", ".join(map(_short, value[:_ITEMS]))
        return f"[{items}, ...] ({len(value)})"
    return _short(value)


def _short(value: object) -> str:
    found = f"{value:.4g}" if isinstance(value, float) else str(value)
    return found if len(found) <= _LETTERS else f"{found[:_LETTERS]}..."
