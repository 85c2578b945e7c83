"""At what context each node of an explained plan stops fitting, and what happens there.

Owns: the words. Does not own: the search (engine/plan/context_limits.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.plan.context_limits import ContextLimit, list_context_limits
from engine.plan.explain.layout import Line, name_line, widest
from engine.plan.plan import Plan


def context_lines(plan: Plan) -> Iterator[Line]:
    """A line for each node that memory limits; none of those that end with their Models' positions
    before.
    """
    limits = [limit for limit in list_context_limits(plan) if limit.by != "positions"]
    width = widest(limit.node for limit in limits)
    for limit in limits:
        yield from name_line(limit.node, width, _describe(limit))


def _describe(limit: ContextLimit) -> str:
    planned = f"{limit.planned:,} as planned"
    if limit.by == "memory":
        return f"{planned}; up to {limit.fits:,} fit, a plan of longer ones is refused"
    rows = f"{limit.at_once:,} of them"
    waits = f"{planned}; the cache holds {rows} at once, of longer ones fewer, and the others wait"
    return f"{waits}; one above {limit.fits:,} is refused"
