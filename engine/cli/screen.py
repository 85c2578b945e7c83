"""Printing: control characters escaped (dataflow/safe_text.py), lines folded where a screen is
narrow.

Owns: how text gets on the screen, and how flags are read and their help shown. Does not own: the
width (dataflow/width.py), any text, any flag.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any, TextIO

import tyro

from dataflow.safe_text import printable
from dataflow.width import fold_lines, screen_width

_CODE = re.compile(r"\x1b\[[0-9;]*m")


def say(text: str = "", *, end: str = "\n", fold: bool = True) -> None:
    """Print a text. fold: its lines may be broken; not those of a file that is printed."""
    print(printable(fold_lines(text, screen_width(sys.maxsize)) if fold else text), end=end)


def read_flags(kind: Any, *, args: Sequence[str], prog: str, about: str, **more: Any) -> Any:
    """What tyro makes of flags; about: above the help. Raises SystemExit like `tyro.cli`."""
    shown = _Help(sys.stdout)
    try:
        with redirect_stdout(shown):
            return tyro.cli(kind, args=args, prog=prog, description=about, **more)
    finally:
        print(shown.fitted(), end="")


class _Help(io.StringIO):
    """What tyro prints, which fits its tables to the screen and nothing else. real: the screen."""

    def __init__(self, real: TextIO) -> None:
        super().__init__()
        self._real = real

    def isatty(self) -> bool:
        return self._real.isatty()

    def fitted(self) -> str:
        """With its other lines folded. Codes for colours have no width."""
        lines, width = self.getvalue().split("\n"), screen_width(sys.maxsize)
        wide = [len(_CODE.sub("", line)) > width for line in lines]
        return "\n".join(
            fold_lines(line, width) if is_wide else line
            for line, is_wide in zip(lines, wide, strict=True)
        )
