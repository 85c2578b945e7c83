"""How much room words take in a picture, before any font is known.

Owns: estimates that no common font exceeds by much, and wrapping. Does not own: any place.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from unicodedata import east_asian_width

_NARROW = set("ijl.,:;'|!()[]{}ft/\\ r-")
_WIDE = set("mwMW@%&")
_BOLD = 1.06


def sans(words: str, size: float, *, bold: bool = False) -> float:
    """Pixels of a line in the proportional font."""
    ems = sum(map(_ems, words))
    return ems * size * (_BOLD if bold else 1.0)


def _ems(letter: str) -> float:
    if east_asian_width(letter) in "WF":
        return 1.05
    if letter in _NARROW:
        return 0.36
    if letter in _WIDE:
        return 0.92
    return 0.7 if letter.isupper() else 0.59


def mono(words: str, size: float) -> float:
    """Pixels of a line in the font of fixed width."""
    letters = sum(2 if east_asian_width(letter) in "WF" else 1 for letter in words)
    return letters * size * 0.61


def lines_of(words: str, width: int, most: int, indent: str = "  ") -> list[str]:
    """At most so many lines of at most `width` letters; `...` stands for what is left out."""
    lines = textwrap.wrap(
        words, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=True
    )
    if len(lines) > most:
        lines = [*lines[: most - 1], cut(lines[most - 1] + " " * width, width)]
    return lines


def cut(words: str, letters: int) -> str:
    """The words, or their beginning with `...` after it."""
    return words if len(words) <= letters else f"{words[: letters - 3].rstrip()}..."


def named(names: Sequence[str], most: int = 4) -> str:
    """`a, b, c`, or `a, b, c and 5 more`."""
    more = len(names) - most
    shown = ", ".join(names if more <= 1 else names[:most])
    return shown if more <= 1 else f"{shown} and {more} more"
