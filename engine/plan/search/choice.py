"""The search: the best few placements of a problem.

Owns: what is tried, in which order, and when it ends; what fell out. Does not own: prices
(group_price.py, step_time.py), devices of groups (division.py).

Every grouping of the nodes that take most is tried while these are few; the light ones ride with a
node of their Model, else with one whose rows they read. From the best of these, from lists in which
each node joins the group that is free first, and from groupings that grow node by node, steps lead
on for as long as a Step becomes shorter. The search counts what it prices and knows no clock, so
that it finds the same everywhere.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from engine.plan.search.division import Division
from engine.plan.search.groupings import (
    Grouping,
    arrange,
    count_groupings,
    join_members,
    list_groupings,
    list_steps,
    relieve,
)
from engine.plan.search.grown_starts import grow_groupings
from engine.plan.search.list_starts import list_starts
from engine.plan.search.problem import Members, Placement, Problem

KEPT = 5
"""Placements that a search leaves."""
_HEAVY = 6
"""Nodes of which every grouping is tried."""
_LEAST_GAIN = 1e-4
_BEGUN = 8
"""Placements from which steps lead on."""
_WORSE = 1.3
"""Times as long as the best: from what is no worse steps may lead to something better."""
_PATIENCE = 16
"""Placements from which no step leads to anything better, until the search ends."""
_FEW_NODES = 24
"""Up to which every step is tried."""
_BUSIEST = 4
_IDLEST = 8
"""Groups of which nodes go to others, and these, where there are more nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """groupings: the most that are all tried; 0: none are. priced: placements after which no
    further step is taken; of many nodes fewer, as each takes longer. grown: placements that are
    priced while groupings grow.
    """

    groupings: int = 4000
    priced: int = 20_000
    grown: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """best: placements, the best first. tried: groupings. unfit: of these, those that do not fit.
    priced: placements of which a Step was timed.
    """

    best: tuple[Placement, ...] = ()
    tried: int = 0
    unfit: int = 0
    priced: int = 0


def search(problem: Problem, limits: Limits | None = None) -> Findings:
    """Find the placements with the least seconds, or cost, of a Step. None where nothing fits."""
    return _Search(problem, limits or Limits()).run()


class _Search:
    def __init__(self, problem: Problem, limits: Limits) -> None:
        self._problem, self._limits = problem, limits
        self._division = Division(problem)
        self._units = list(_join_units(problem))
        self._placements: dict[Grouping, Placement | None] = {}
        """Of groupings that were divided, each once."""
        self._scores: list[float] = []
        """The best few, ascending."""

    def run(self) -> Findings:
        for grouping in self._list_heavy():
            self._try(grouping, 1.0)
        is_complete = len(self._units) <= _HEAVY and bool(self._placements)
        if not is_complete:
            for grouping in self._list_begun():
                self._try(grouping, _WORSE)
            self._lead_on()
        placements = list(self._placements.values())
        return Findings(
            best=tuple(self._best(KEPT)),
            tried=len(placements),
            unfit=placements.count(None),
            priced=self._division.count,
        )

    def _list_begun(self) -> Iterator[Grouping]:
        """Groupings from which steps may lead on."""
        yield from list_starts(self._problem, self._division, self._units)
        if len(self._units) <= _FEW_NODES:
            order = sorted(self._units, key=lambda unit: -self._weigh(unit))
            yield from grow_groupings(self._division, order, self._limits.grown)

    def _list_heavy(self) -> Iterator[Grouping]:
        """Every grouping of the heaviest units, where these are few; the others ride."""
        pools = len(self._problem.pools)
        weights = [self._weigh(unit) for unit in self._units]
        order = sorted(range(len(self._units)), key=lambda number: -weights[number])
        heavy = sorted(order[:_HEAVY])
        if count_groupings(len(heavy), pools) > self._limits.groupings:
            return
        light = [self._units[number] for number in sorted(order[_HEAVY:])]
        if len(light) > _FEW_NODES and 2 * sum(weights[n] for n in heavy) < sum(weights):
            return  # what rides would be most of a Step
        heavy_units = [self._units[number] for number in heavy]
        for grouping in list_groupings(heavy_units, pools):
            yield self._let_ride(grouping, light)

    def _weigh(self, unit: tuple[int, ...]) -> float:
        """The fewest seconds of so many devices that a unit takes on some pool."""
        least = float("inf")
        for pool in range(len(self._problem.pools)):
            curve = self._division.curve(Members(unit, pool))
            if curve:
                least = min(least, curve[0].devices * curve[0].price.busy)
        return least

    def _let_ride(self, grouping: Grouping, light: Sequence[tuple[int, ...]]) -> Grouping:
        """Put each light unit with a node of its Model, else with one that it waits for."""
        nodes = self._problem.nodes
        members_of = [list(group.members) for group in grouping]
        group_of: dict[int, int] = {}
        for number, members in enumerate(members_of):
            group_of |= dict.fromkeys(members, number)
        model_of = {nodes[member].model: group_of[member] for member in group_of}
        for unit in light:
            places = [model_of[nodes[m].model] for m in unit if nodes[m].model in model_of]
            for member in unit:
                places += [group_of[p] for p in nodes[member].parents if p in group_of]
            place = next(iter(places), 0)
            members_of[place] += unit
            group_of |= dict.fromkeys(unit, place)
        groups: list[Members] = []
        for group, members in zip(grouping, members_of, strict=True):
            groups.append(join_members([members], group.pool))
        return arrange(groups)

    def _try(self, grouping: Grouping, worse: float) -> Placement | None:
        """Divide a grouping, unless it is more than so many times as bad as the best few."""
        if grouping in self._placements:
            return self._placements[grouping]
        if self._is_hopeless(grouping, worse):
            return None
        placement = self._division.divide(grouping)
        self._placements[grouping] = placement
        if placement is not None:
            bisect.insort(self._scores, self._score(placement))
            del self._scores[KEPT:]
        return placement

    def _is_hopeless(self, grouping: Grouping, worse: float) -> bool:
        """Whether a Step is longer even with all devices for each group."""
        if self._problem.objective == "cost" or len(self._scores) < KEPT:
            return False
        return self._division.bound(grouping) > self._scores[-1] * worse

    def _lead_on(self) -> None:
        """Go on from the best placement from which nobody has, until some in a row have led to
        nothing better.
        """
        queue = [(self._score(p), number, p) for number, p in enumerate(self._best(_BEGUN))]
        heapq.heapify(queue)
        in_vain = 0
        while queue and in_vain < _PATIENCE and not self._is_over():
            _, _, placement = heapq.heappop(queue)
            best = self._scores[0]
            for grouping in self._list_steps(placement):
                if grouping in self._placements:
                    continue
                tried = self._try(grouping, _WORSE)
                if tried is not None:
                    heapq.heappush(queue, (self._score(tried), len(self._placements), tried))
                if self._is_over():
                    break
            in_vain += 1
            if self._scores[0] < best * (1.0 - _LEAST_GAIN):
                in_vain = 0

    def _is_over(self) -> bool:
        nodes = len(self._problem.nodes)
        return self._division.count * max(nodes, _FEW_NODES) > self._limits.priced * _FEW_NODES

    def _list_steps(self, placement: Placement) -> Iterator[Grouping]:
        """Steps from a placement; of many nodes those that relieve the busiest groups."""
        grouping, pools = _grouping_of(placement), len(self._problem.pools)
        if len(self._units) <= _FEW_NODES:
            yield from list_steps(grouping, self._units, pools)
            return
        busy: list[float] = []
        for group in grouping:
            seconds = (placement.layouts[member].seconds for member in group.members)
            busy.append(sum(seconds))
        order = sorted(range(len(grouping)), key=lambda number: -busy[number])
        yield from relieve(grouping, self._units, order[:_BUSIEST], order[-_IDLEST:])

    def _best(self, count: int) -> list[Placement]:
        placements = [p for p in self._placements.values() if p is not None]
        return heapq.nsmallest(count, placements, key=lambda p: (self._score(p), p.devices))

    def _score(self, placement: Placement) -> float:
        if self._problem.objective == "cost":
            return placement.cost
        return placement.seconds


def _grouping_of(placement: Placement) -> Grouping:
    return arrange([Members(group.members, group.pool) for group in placement.groups])


def _join_units(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Nodes that have to share devices, and each of the others alone; in running order."""
    units: list[tuple[int, ...]] = [tuple(sorted(group)) for group in problem.together]
    joined = set(chain.from_iterable(units))
    units += [(number,) for number in range(len(problem.nodes)) if number not in joined]
    yield from sorted(units)
