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
from tyro.constructors import ConstructorRegistry

from dataflow.safe_text import printable
from dataflow.width import fold_lines, screen_width

_CODE = re.compile(r"\x1b\[[0-9;]*m")


def say(text: str = "", *, end: str = "\n", fold: bool = True) -> None:
    """Print a text. fold: its lines may be broken; not those of a file that is printed."""
    if fold:
        text = fold_lines(text, screen_width(sys.maxsize))
    print(printable(text), end=end)


def read_flags(
    kind: Any,
    *,
    args: Sequence[str],
    prog: str,
    about: str,
    registry: ConstructorRegistry | None = None,
    config: Sequence[Any] | None = None,
    return_unknown_args: bool = False,
) -> Any:
    """Read flags with tyro into an instance of this kind; with return_unknown_args also returns the
    words that it has no flag for. about: stands above the help. Raises SystemExit like `tyro.cli`.
    """
    help_text = _Help(sys.stdout)
    try:
        with redirect_stdout(help_text):
            return tyro.cli(
                kind,
                args=args,
                prog=prog,
                description=about,
                registry=registry,
                config=config,
                return_unknown_args=return_unknown_args,
            )
    finally:
        print(help_text.fold_lines(), end="")


class _Help(io.StringIO):
    """What tyro prints, which fits its tables to the screen and nothing else. real: the screen."""

    def __init__(self, real: TextIO) -> None:
        super().__init__()
        self._real = real

    def isatty(self) -> bool:
        return self._real.isatty()

    def fold_lines(self) -> str:
        """Fold the lines that are wider than the screen. Codes for colours have no width."""
        width = screen_width(sys.maxsize)
        lines: list[str] = []
        for line in self.getvalue().split("\n"):
            if len(_CODE.sub("", line)) > width:
                line = fold_lines(line, width)
            lines.append(line)
        return "\n".join(lines)
