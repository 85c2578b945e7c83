"""A table that fits: columns that matter less are left out, and long names are cut.

Owns: widths. Does not own: what the cells say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from dataflow.safe_text import one_line

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


def table_lines(columns: Sequence[TableColumn], width: int) -> Iterator[Text]:
    """Lines of at most `width` columns; the first column is that of names. None without rows."""
    columns_with_cells = [column for column in columns if any(map(len, column.cells))]
    if not columns_with_cells or not columns_with_cells[0].cells:
        return
    names, *others = columns_with_cells
    name_width = _width(names)
    while _room_beside(others, width) < min(name_width, _LEAST):
        least = max(others, key=lambda column: column.rank)
        if not least.rank:
            break
        others.remove(least)
    room = max(_room_beside(others, width), _LEAST)
    table = [names, *others]
    widths = [min(name_width, room), *map(_width, others)]
    titles = [Text(column.title, style="dim") for column in table]
    yield _line(titles, table, widths)
    for row in zip(*(column.cells for column in table), strict=True):
        yield _line([_as_text(cell) for cell in row], table, widths)


def _room_beside(columns: Sequence[TableColumn], width: int) -> int:
    """What is left for the names."""
    return width - sum(_width(column) + _GAP for column in columns)


def _as_text(cell: Text | str) -> Text:
    if isinstance(cell, str):
        return Text(cell)
    return cell


def _width(column: TableColumn) -> int:
    return max([len(column.title), *map(len, column.cells)])


def _line(cells: Sequence[Text], columns: Sequence[TableColumn], widths: Sequence[int]) -> Text:
    line = Text()
    for at, (cell, column, width) in enumerate(zip(cells, columns, widths, strict=True)):
        blank = " " * (width - len(cell))
        line.append(" " * _GAP if at else "")
        if len(cell) > width:
            line.append(shorten_line(cell.plain, width))
        elif column.right and at:
            line.append(blank).append_text(cell)
        else:
            line.append_text(cell).append(blank)
    line.rstrip()
    return line


def shorten_line(text: str, width: int) -> str:
    """Shorten a text to a line of at most so many characters, by leaving out its middle."""
    text = one_line(text)
    if len(text) <= width:
        return text
    head = (width - 2) // 2
    tail = width - 2 - head
    return f"{text[:head]}..{text[len(text) - tail :]}"
