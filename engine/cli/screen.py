"""What a command prints.

Owns: that whatever it is can be shown (dataflow/shown.py). Does not own: any text.
"""

from __future__ import annotations

from dataflow.shown import printable


def say(text: str = "", *, end: str = "\n") -> None:
    """Print a text, control characters in it escaped."""
    print(printable(text), end=end)
