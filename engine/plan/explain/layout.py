"""Text that fits: columns side by side, names, wrapped lines, counts and durations in words.

Owns: the width, and how a line breaks. Does not own: any text.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from dataflow.width import fold_lines

WIDTH = 120
_NAME = 24
"""The widest name that shares its line with a text."""
_wrap = partial(textwrap.wrap, break_on_hyphens=False)

Line = str | Callable[[int], Iterable[str]]
"""A text: one line, or what makes lines of it for a number of columns."""


def lay_out(line: Line, room: int) -> Iterable[str]:
    """Lay a line out in this many columns."""
    if callable(line):
        return line(room)
    return fold_lines(line, room).split("\n")


def count(number: int, noun: str) -> str:
    """Write a number of things: `3 Steps`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def duration(seconds: float | None) -> str:
    """Write seconds in two digits: `21 s`, `1.3 s`, `4 ms`; `-` where nothing is known."""
    if seconds is None:
        return "-"
    # Each bound is where rounding would add a digit: 9.95 ms are `10 ms`, not `10.0 ms`.
    if seconds < 0.00995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:,.0f} s"


def widest(names: Iterable[str], limit: int = _NAME) -> int:
    """The width of a column of names; names that are too long do not widen it."""
    longest = max((len(name) for name in names), default=0)
    return min(limit, longest)


def side_by_side(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Write cells side by side, two blanks between them; one that is too wide pushes the rest
    along.
    """
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    return "  ".join(padded).rstrip()


def name_line(name: str, width: int, text: str, *, tail: str = "") -> Iterator[Line]:
    """Write a name and its text beside it; too long a name has its own line. The tail wraps after
    the text.
    """
    yield partial(_lay_out_name, name, width, text, tail)


def _lay_out_name(name: str, width: int, text: str, tail: str, room: int) -> Iterator[str]:
    if len(name) > width:
        yield from textwrap.wrap(name, room, subsequent_indent="  ")
        name = ""
    start = f"{name.ljust(width)}  {text}"
    whole = f"{start}  {tail}".rstrip()
    indent = len(start) if tail else width
    if room < min(len(whole), WIDTH - 2):
        # Leave out the blanks that make columns: nothing is in columns on so few.
        close = re.sub("   +", "  ", whole[width:])
        whole = f"{whole[:width]}{close}"
    if room < WIDTH - 2 and indent > room // 2:
        yield from fold_lines(whole, room).split("\n")
    else:
        indent = min(indent, 3 * WIDTH // 4)
        yield from _wrap(whole, width=room, subsequent_indent=" " * (indent + 2))


def wrap_line(text: str, *, indent: int = 0, after: int = 0) -> Iterator[Line]:
    """Break a text into lines that fit; later lines are indented by `after` more."""
    yield partial(_lay_out_text, text, indent, after)


def _lay_out_text(text: str, indent: int, after: int, room: int) -> list[str]:
    indent = min(indent, room // 4)
    first, rest = " " * indent, " " * (indent + after)
    return _wrap(
        text,
        width=room,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
    )
