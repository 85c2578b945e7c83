"""How wide text on a screen may be, and text that is made to fit.

Owns: where the width is read from, and how lines are folded. Does not own: what is shown, colours.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TextIO

NARROWEST = 40
"""No text is made for fewer columns."""

_AFTER = 4
"""Blanks that the later parts of a folded line have more than the first."""


def screen_width(widest: int, stream: TextIO | None = None) -> int:
    """Columns for text on this stream (standard output by default): those that the environment's
    COLUMNS says, else those of its terminal, at least NARROWEST and at most `widest`; `widest`
    where neither is known.
    """
    setting = os.environ.get("COLUMNS", "")
    columns = int(setting) if setting.isdecimal() else 0
    if not columns:
        columns = _terminal_width(sys.stdout if stream is None else stream)
    if not columns:
        return widest
    return max(NARROWEST, min(widest, columns))


def _terminal_width(stream: TextIO) -> int:
    """Columns of the terminal that a stream writes to; 0 where it writes to none."""
    if stream.isatty():
        with suppress(OSError):  # a stream that has no file of its own
            return os.get_terminal_size(stream.fileno()).columns
    return 0


def fold_lines(text: str, width: int) -> str:
    """Fold every line of a text that is longer than `width` between words, its later parts indented
    a little more. Within a folded line columns stand two blanks apart. A word that is too long,
    such as a path, stays whole.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
        else:
            lines += _fold(line, width)
    return "\n".join(lines)


def _fold(line: str, width: int) -> list[str]:
    words = line.lstrip(" ")
    indent = " " * min(len(line) - len(words), width // 2)
    return textwrap.wrap(
        re.sub("   +", "  ", words),
        width,
        initial_indent=indent,
        subsequent_indent=indent + " " * _AFTER,
        break_long_words=False,
        break_on_hyphens=False,
    )


def pack_parts(parts: Iterable[str], width: int, *, indent: str = "") -> Iterator[str]:
    """Make lines of as many parts as fit side by side, two blanks between them; no part is broken.
    indent: of every line but the first.
    """
    line = ""
    for part in parts:
        if not line.strip():
            line = f"{line}{part}"
        elif len(longer := f"{line}  {part}") <= width:
            line = longer
        else:
            yield line
            line = f"{indent}{part}"
    yield line
