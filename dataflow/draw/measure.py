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
"""How much wider bold letters are."""
_MONO_EMS = 0.61
_MARKS = (r"(?<=[(\[])", r"(?<=[_/.,=:-])", r"(?s)(?=.)")
"""Where a word may be parted, the best places first: behind a bracket, behind another mark,
anywhere.
"""


def measure_sans(words: str, size: float, *, bold: bool = False) -> float:
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


def measure_mono(words: str, size: float) -> float:
    """Pixels of a line in the font of fixed width."""
    wide = sum(east_asian_width(letter) in "WF" for letter in words)
    return (len(words) + wide) * size * _MONO_EMS


def break_lines(words: str, width: int, most: int, indent: str = "  ") -> list[str]:
    """Break words into at most so many lines of at most `width` letters; `...` stands for what is
    left out. A word that is longer than a line is parted at a bracket, else at another mark, else
    anywhere.
    """
    lines: list[str] = []
    line = ""
    for word in words.split():
        gap = " " if line.strip() else ""
        for part in _part_word(word, width - len(indent)):
            is_full = len(line) + len(gap) + len(part) > width
            if is_full and line.strip():
                lines.append(line)
                line, gap = indent, ""
            line += gap + part
            gap = ""  # parts of one word stand side by side
    if line.strip():
        lines.append(line)
    if len(lines) > most:
        # Padded, so that it is too long and ends in `...`.
        last = truncate(lines[most - 1] + " " * width, width)
        lines = [*lines[: most - 1], last]
    return lines


def _part_word(word: str, width: int) -> list[str]:
    """A word, or parts of it that each fit."""
    parts = [word]
    for mark in _MARKS:
        shorter_parts: list[str] = []
        for part in parts:
            shorter_parts += _part_at(part, mark, width)
        parts = shorter_parts
    return parts


def _part_at(part: str, mark: str, width: int) -> list[str]:
    """A part that is too long as the longest runs of pieces that fit."""
    if len(part) <= width:
        return [part]
    runs = [""]
    for piece in re.split(mark, part):
        last = runs[-1]
        if last and len(last) + len(piece) > width:
            runs.append("")
        runs[-1] += piece
    return runs


def truncate(words: str, letters: int) -> str:
    """The words, or their beginning with `...` after it."""
    if len(words) <= letters:
        return words
    return f"{words[: letters - 3].rstrip()}..."


def join_names(names: Sequence[str], most: int = 4) -> str:
    """`a, b, c`, or `a, b, c and 5 more`."""
    more = len(names) - most
    # One name is no longer than `and 1 more`.
    if more <= 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {more} more"
