"""Text made safe for display: on a terminal, in a log, in a drawing.

Owns: which characters are escaped there, how a size or a number is written. Does not own: a
format's own escapes (draw/), what is worth showing.

Data, error messages and names come from anywhere. An escape sequence in them would move the cursor,
rename the window or hide a line; a bidirectional override would show a name backwards; a line
separator would begin a new line.
"""

from __future__ import annotations

import math
import re

_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL, C1
    # changes the direction, or is invisible
    "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u206f\ufeff"
    "\u2028\u2029"  # line separators
    "\ud800-\udfff"  # halves of a character, which no encoding can write
    "\U000e0000-\U000e007f]"  # tags, which are invisible
)


def printable(text: str, *, keep: str = "\n\t") -> str:
    """The text with every control character as its code: `\\x1b`, `\\u202e`. keep: characters that
    stay; empty if the text must be one line.
    """

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        return character if character in keep else _code(ord(character))

    return _CONTROLS.sub(escape, text)


def one_line(text: str) -> str:
    """The text with line ends and tabs as codes, too."""
    return printable(text, keep="")


def _code(point: int) -> str:
    if point < 0x100:
        return f"\\x{point:02x}"
    if point < 0x10000:
        return f"\\u{point:04x}"
    return f"\\U{point:08x}"


def shown_bytes(count: int) -> str:
    """`381 MiB`, `5.3 MiB`, `96 B`."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if round(abs(size)) < 1024:  # as it would be shown
            break
        size, unit = size / 1024, larger
    # No decimal where three digits stand before it, as they would be shown.
    if unit == "B" or round(abs(size), 1) >= 100:
        return f"{size:.0f} {unit}"
    return f"{size:.1f} {unit}"


def shown_number(number: float, digits: int = 3) -> str:
    """`0.31`, `12.5`, `3,210`, `1.2e-06`: so many digits, and all of the whole part."""
    short = f"{number:.{digits}g}"
    if math.isfinite(number) and abs(float(short)) >= 10**digits:
        return f"{number:,.0f}"  # `short` would have an exponent
    return short
