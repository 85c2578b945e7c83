"""Text that fits: columns side by side, names, wrapped lines, counts and durations in words.

Owns: the width, and how a line breaks. Does not own: anything that is said.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from dataflow.width import folded

WIDTH = 120
_NAME = 24
"""The widest name that shares its line with a text."""
_wrap = partial(textwrap.wrap, break_on_hyphens=False)

Line = str | Callable[[int], Iterable[str]]
"""What is said, as one line or as lines for a number of columns."""


def laid(line: Line, room: int) -> Iterable[str]:
    """In this many columns."""
    return line(room) if callable(line) else folded(line, room).split("\n")


def count(number: int, noun: str) -> str:
    """`3 Steps`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def duration(seconds: float | None) -> str:
    """`21 s`, `1.3 s`, `4 ms`; `-` where nothing is known."""
    if seconds is None:
        return "-"
    if seconds < 0.0995:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.00995 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:,.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"


def widest(names: Iterable[str], limit: int = _NAME) -> int:
    """The width of a column of names; names that are too long do not widen it."""
    return min(limit, max((len(name) for name in names), default=0))


def side_by_side(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells side by side, two blanks between them; one that is too wide pushes the rest along."""
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip()


def named(name: str, width: int, text: str, *, tail: str = "") -> Iterator[Line]:
    """A name and its text; too long a name has its own line. The tail wraps after the text."""
    yield partial(_named, name, width, text, tail)


def _named(name: str, width: int, text: str, tail: str, room: int) -> Iterator[str]:
    if len(name) > width:
        yield from textwrap.wrap(name, room, subsequent_indent="  ")
    start = f"{name.ljust(width) if len(name) <= width else ' ' * width}  {text}"
    whole, indent = f"{start}  {tail}".rstrip(), len(start) if tail else width
    if room < min(len(whole), WIDTH - 2):  # without the blanks that make columns
        close = re.sub("   +", "  ", whole[width:])
        whole = f"{whole[:width]}{close}"
    if room < WIDTH - 2 and indent > room // 2:
        yield from folded(whole, room).split("\n")
    else:
        indent = min(indent, 3 * WIDTH // 4)
        yield from _wrap(whole, width=room, subsequent_indent=" " * (indent + 2))


def wrapped(text: str, *, indent: int = 0, after: int = 0) -> Iterator[Line]:
    """Text in lines that fit; later lines are indented by `after` more."""
    yield partial(_wrapped, text, indent, after)


def _wrapped(text: str, indent: int, after: int, room: int) -> list[str]:
    indent = min(indent, room // 4)
    first, rest = " " * indent, " " * (indent + after)
    return _wrap(
        text,
        width=room,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
    )
