"""What a Worker reports of itself: numbers, spans, and what it is doing.

Owns: their types. Does not own: how they become a Step's numbers
(engine/keep/metrics/step_accounts.py) or a trace.
"""

from __future__ import annotations

import msgspec

Report = tuple[str, float, float]
"""(metric, value, count)."""

FLOW = "flow/"
"""Begins the names of reports that are figures of what flows (engine/keep/flow), no metrics."""


class SpanOf(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True):
    """Something that a Worker did. Of one track, spans follow one another.

    track: worker/node. name: short, equal for all that is alike. start, end: seconds of the
    monotonic clock. what: the same with its particulars, as in Doing.
    """

    track: str
    name: str
    start: float
    end: float
    what: str = ""
    task: int = -1
    """The id of the instruction that it was part of; -1: of none."""
    block: int = -1
    """The block of the rows that it made; -1: it made none."""
    rows: int = 0
    tokens: int = 0
    """Of the rows that it made."""
    computes: bool = True
    """Whether a kernel was at work; not where code or files were read, or files written."""
    waits: bool = False
    """Whether a kernel only waited, in the midst of another span of this track."""
    beside: bool = False
    """Whether a further thread did it, beside what the Worker did."""

    @property
    def worker(self) -> str:
        """Who did it."""
        return self.track.partition("/")[0]


class Doing(msgspec.Struct, frozen=True, kw_only=True):
    """What a Worker is doing. since: on the monotonic clock; node is empty where it is idle.
    computes: as of a span. waits_for: what its kernel waits for, as environments, since
    `waits_since`; empty where it computes.
    """

    worker: str
    node: str = ""
    what: str = ""
    since: float = 0.0
    computes: bool = True
    waits_for: str = ""
    waits_since: float = 0.0
