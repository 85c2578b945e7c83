"""The stretch of time that stands for a run: its last seconds while it goes on, else all its Steps.

Owns: this choice, which the page, `top` and the report share, so that they say the same of a run.
Does not own: the files (segments.py), what is said of a stretch (engine/watch/waits.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.keep.flow.flow_sums import sum_flows
from engine.keep.flow.records import Flow

SECONDS = 10.0
"""Of the stretch while a run goes on: of a shorter one most Steps have only a part."""


def last_seconds(flows: Sequence[Flow]) -> Flow | None:
    """The last SECONDS of these, in order, as one; None without any. A stretch that took longer
    stands alone: a run in one process writes none while its kernel holds the interpreter's lock.
    """
    if not flows:
        return None
    end = flows[-1].wall
    return sum_flows(flow for flow in flows if flow.wall > end - SECONDS)


def seconds_named(flow: Flow) -> str:
    """The words for last seconds."""
    return f"the last {flow.end - flow.start:.0f} s"


def steps_named(first: int, last: int) -> str:
    """The words for the Steps first..last."""
    if first == last:
        return f"Step {last}"
    return f"Steps {first} to {last}"
