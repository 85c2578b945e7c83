"""A table that fits: columns that matter less are left out, and long names are cut.

Owns: widths. Does not own: what the cells say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from dataflow.shown import one_line

_GAP = 2
_LEAST = 28
"""Columns of a name that is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """A title, and a cell for each row. rank: the greatest is left out first; 0 stays. right: the
    cells end at its right edge.
    """

    title: str
    cells: Sequence[Text | str]
    rank: int = 0
    right: bool = True


def table(columns: Sequence[TableColumn], width: int) -> Iterator[Text]:
    """Lines of at most `width` columns; the first column is that of names. None without rows."""
    kept = [c for c in columns if any(len(cell) for cell in c.cells)]
    if not kept or not kept[0].cells:
        return
    while (room := width - sum(_width(c) + _GAP for c in kept[1:])) < min(_width(kept[0]), _LEAST):
        least = max(kept[1:], key=lambda c: c.rank)
        if not least.rank:
            break
        kept.remove(least)
    widths = [min(_width(kept[0]), max(room, _LEAST)), *(_width(c) for c in kept[1:])]
    yield _line([Text(c.title, style="dim") for c in kept], kept, widths)
    for row in zip(*(c.cells for c in kept), strict=True):
        yield _line([cell if isinstance(cell, Text) else Text(cell) for cell in row], kept, widths)


def _width(column: TableColumn) -> int:
    return max([len(column.title), *map(len, column.cells)])


def _line(cells: Sequence[Text], columns: Sequence[TableColumn], widths: Sequence[int]) -> Text:
    found = Text()
    for at, (cell, column, width) in enumerate(zip(cells, columns, widths, strict=True)):
        blank = " " * (width - len(cell))
        found.append(" " * _GAP if at else "")
        if len(cell) > width:
            found.append(shortened(cell.plain, width))
        elif column.right and at:
            found.append(blank).append_text(cell)
        else:
            found.append_text(cell).append(blank)
    found.rstrip()
    return found


def shortened(text: str, width: int) -> str:
    """At most so many characters of one line, its middle left out."""
    text = one_line(text)
    if len(text) <= width:
        return text
    head = (width - 2) // 2
    return f"{text[:head]}..{text[len(text) - (width - 2 - head) :]}"
