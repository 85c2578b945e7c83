"""At what context each node of an explained plan stops fitting, and what happens there.

Owns: the words. Does not own: the search (engine/plan/context_limits.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.plan.context_limits import (
    ContextLimit,
    IntakeLimit,
    list_context_limits,
    list_intake_limits,
)
from engine.plan.explain.layout import Line, name_line, widest
from engine.plan.plan import Plan


def context_lines(plan: Plan) -> Iterator[Line]:
    """A line for each node that memory limits; none of those that end with their Models' positions
    before. And a line for each source with a lag whose intake slows before.
    """
    texts = {}
    for limit in list_context_limits(plan):
        if limit.by != "positions":
            texts[limit.node] = _describe(limit)
    for intake in list_intake_limits(plan):
        texts[intake.source] = _describe_intake(intake)
    width = widest(texts)
    for name, text in texts.items():
        yield from name_line(name, width, text)


def _describe_intake(limit: IntakeLimit) -> str:
    planned = f"its rows have {limit.planned:,} live tokens at most as planned"
    return f"{planned}; the intake slows from {limit.slows:,} on"


def _describe(limit: ContextLimit) -> str:
    planned = f"{limit.planned:,} as planned"
    if limit.by == "memory":
        return f"{planned}; up to {limit.fits:,} fit, a plan of longer ones is refused"
    rows = f"{limit.at_once:,} of them"
    waits = f"{planned}; the cache holds {rows} at once, of longer ones fewer, and the others wait"
    return f"{waits}; one above {limit.fits:,} is refused"
