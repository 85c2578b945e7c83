"""What a Worker reports of itself: numbers, spans, and what it is doing.

Owns: their types. Does not own: how they become a Step's numbers (accounts.py) or a trace.
"""

from __future__ import annotations

from dataclasses import dataclass

Report = tuple[str, float, float]
"""(metric, value, count)."""

FLOW = "flow/"
"""Begins the names of reports that are figures of what flows (engine/observe/flow), no metrics."""

SpanOf = tuple[str, str, float, float]
"""(track, name, start, end); the track is worker/node, times are of the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """What a Worker is doing. since: on the monotonic clock; node is empty where it is idle."""

    worker: str
    node: str = ""
    what: str = ""
    since: float = 0.0
