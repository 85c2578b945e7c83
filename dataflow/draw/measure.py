"""How much room words take in a picture, before any font is known.

Owns: estimates that no common font exceeds by much, and wrapping. Does not own: any place.
"""

from __future__ import annotations

import re
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
    """At most so many lines of at most `width` letters; `...` stands for what is left out. A word
    that is longer than a line is parted at a bracket, else at another mark, else anywhere.
    """
    lines: list[str] = []
    now = ""
    for word in words.split():
        gap = " " if now.strip() else ""
        for part in _parts(word, width - len(indent)):
            if len(now) + len(gap) + len(part) > width and now.strip():
                lines.append(now)
                now, gap = indent, ""
            now, gap = now + gap + part, ""
    lines += [now] if now.strip() else []
    if len(lines) > most:
        lines = [*lines[: most - 1], cut(lines[most - 1] + " " * width, width)]
    return lines


def _parts(word: str, width: int) -> list[str]:
    """A word, or parts of it that each fit."""
    found = [word]
    for marks in (r"(?<=[(\[])", r"(?<=[_/.,=:-])", r"(?s)(?=.)"):
        found = [piece for part in found for piece in _parted(part, marks, width)]
    return found


def _parted(part: str, marks: str, width: int) -> list[str]:
    """A part that is too long as the longest runs of pieces that fit."""
    if len(part) <= width:
        return [part]
    runs = [""]
    for piece in re.split(marks, part):
        if runs[-1] and len(runs[-1]) + len(piece) > width:
            runs.append("")
        runs[-1] += piece
    return runs


def cut(words: str, letters: int) -> str:
    """The words, or their beginning with `...` after it."""
    return words if len(words) <= letters else f"{words[: letters - 3].rstrip()}..."


def named(names: Sequence[str], most: int = 4) -> str:
    """`a, b, c`, or `a, b, c and 5 more`."""
    more = len(names) - most
    shown = ", ".join(names if more <= 1 else names[:most])
    return shown if more <= 1 else f"{shown} and {more} more"
