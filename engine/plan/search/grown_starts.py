"""Groupings that grow: nodes are placed one after another, and the best few partial ones go on.

Owns: these. Does not own: what a partial grouping costs (division.py), what comes of whole ones
(choice.py).

A beam search over places of nodes, the heaviest first: while few are placed, all of their
groupings are there; then the best ones, as many as the bound on what is priced allows. So what
several nodes have to do at once, each of which alone makes a Step longer, is tried as well.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from engine.plan.search.division import Division
from engine.plan.search.groupings import Grouping, arrange, join_members
from engine.plan.search.problem import Members

_LEAST_WIDTH, _MOST_WIDTH = 4, 40
"""Partial groupings that go on."""


def grow_groupings(
    division: Division, units: Sequence[tuple[int, ...]], most: int
) -> Iterator[Grouping]:
    """Yield whole groupings. units: in the order in which they are placed. most: placements that
    are priced on the way, about: the more a partial grouping needs, the fewer go on.
    """
    pools = len(division.problem.pools)
    begun = division.count
    partial: list[Grouping] = [()]
    for placed, unit in enumerate(units[:-1], start=1):
        before = division.count
        scored: list[tuple[float, int, Grouping]] = []
        for grouping in _place_next(partial, unit, pools):
            score = division.least_score(grouping)
            if score < float("inf"):
                scored.append((score, len(scored), grouping))
        # Each that goes on is priced as often as one did here, in each place.
        need = max(1, division.count - before) / max(1, len(partial))
        remaining = (most - (division.count - begun)) / (len(units) - placed)
        width = min(_MOST_WIDTH, max(_LEAST_WIDTH, int(remaining / need)))
        partial = [grouping for _, _, grouping in heapq.nsmallest(width, scored)]
    yield from _place_next(partial, units[-1], pools)


def _place_next(
    partial: Sequence[Grouping], unit: tuple[int, ...], pools: int
) -> Iterator[Grouping]:
    """Each grouping with a unit in each of its groups, and in a new one."""
    for grouping in partial:
        for index, group in enumerate(grouping):
            rest = [*grouping[:index], *grouping[index + 1 :]]
            yield arrange([*rest, join_members([group.members, unit], group.pool)])
        for pool in range(pools):
            yield arrange([*grouping, Members(unit, pool)])
