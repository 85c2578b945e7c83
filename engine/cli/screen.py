"""Printing, with control characters escaped (dataflow/shown.py)."""

from __future__ import annotations

from dataflow.shown import printable


def say(text: str = "", *, end: str = "\n") -> None:
    """Print a text, control characters in it escaped."""
    print(printable(text), end=end)
