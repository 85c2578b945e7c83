"""The colours of drawings, one place for all forms.

Owns: which colour stands for which work. Does not own: anything else.
"""

from __future__ import annotations

from collections.abc import Mapping

from dataflow.operator import Work

FILLS: Mapping[str, tuple[str, str]] = {
    "source": ("#e8f1fb", "#5b8fc9"),
    "decode": ("#fdf0dc", "#d4953a"),
    "host": ("#f3f4f6", "#8a93a3"),
    "forward": ("#e9f6ec", "#5aa469"),
    "train": ("#fbe6e6", "#cc5f5f"),
    "evaluate": ("#e6f6f6", "#46a0a0"),
}
"""Kind of box -> (fill, line)."""

STATE = ("#f3ecfa", "#8e68bf")
CUT = "#cc5f5f"
INK = "#1f2430"
SOFT = "#5d6675"
WIRE = "#9aa3b2"


def fill_of(work: Work) -> str:
    """The kind of box that shows a node's work."""
    if work in ("replay", "store", "record", "select", "tokenise"):
        return "source" if work == "replay" else "host"
    return work
