"""The colours of drawings, one place for all forms.

Owns: which colour stands for which work, on light and on dark pages. Does not own: anything else.
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
"""Kind of box -> (fill, line), on a light page."""

_DARK_FILLS: Mapping[str, tuple[str, str]] = {
    "source": ("#1b2c40", "#6ba3e0"),
    "decode": ("#3a2c14", "#dca24a"),
    "host": ("#272c36", "#8c96a8"),
    "forward": ("#1c3324", "#6dbb7e"),
    "train": ("#402224", "#e07a7a"),
    "evaluate": ("#163536", "#56b4b4"),
}

STATE = ("#f3ecfa", "#8e68bf")
CUT = "#cc5f5f"
INK = "#1f2430"
SOFT = "#5d6675"
WIRE = "#9aa3b2"


def _box_properties(fills: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Custom properties of boxes: all fills, then all lines."""
    properties: dict[str, str] = {}
    for kind, (fill, _) in fills.items():
        properties[f"{kind}-fill"] = fill
    for kind, (_, line) in fills.items():
        properties[f"{kind}-line"] = line
    return properties


LIGHT: Mapping[str, str] = {
    "ink": INK,
    "soft": SOFT,
    "paper": "#ffffff",
    "panel": "#fbfcfe",
    "rule": "#dde2ea",
    "wire": "#7d8798",
    "cut": CUT,
    "cut-text": "#b03a3a",
    "state-fill": STATE[0],
    "state-line": STATE[1],
    "state-text": "#6f4aa3",
    "worker": "#eef2f8",
    "worker-line": "#b8c3d4",
    "note": "#7a4a00",
    "focus": "#1a6fd6",
    **_box_properties(FILLS),
}
"""Custom property, without its prefix -> colour."""

DARK: Mapping[str, str] = {
    "ink": "#e8ebf1",
    "soft": "#a9b3c4",
    "paper": "#12151b",
    "panel": "#191d25",
    "rule": "#323946",
    "wire": "#8590a3",
    "cut": "#e07a7a",
    "cut-text": "#f09a9a",
    "state-fill": "#2d2340",
    "state-line": "#ab88dd",
    "state-text": "#c6a9f0",
    "worker": "#1f2530",
    "worker-line": "#465064",
    "note": "#f0c070",
    "focus": "#6ab0ff",
    **_box_properties(_DARK_FILLS),
}


def fill_of(work: Work) -> str:
    """The kind of box that shows a node's work."""
    if work == "replay":
        return "source"
    if work in ("store", "record", "select", "tokenise"):
        return "host"
    return work
