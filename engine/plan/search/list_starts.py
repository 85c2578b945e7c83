"""Placements from which a search begins: lists in which each node joins the group that ends first.

Owns: these. Does not own: what comes of them (choice.py).

Graham's list scheduling, with groups in the place of machines: for 1, 2, 4, ... groups of equal
numbers of devices, on all pools and on each alone. A node joins a group only where all of it still
fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.plan.search.division import Division
from engine.plan.search.groupings import Grouping, arrange, join_members
from engine.plan.search.problem import Problem

Units = Sequence[tuple[int, ...]]
_LOOKED_AT = 64
"""Members of a group up to which it is looked at whether another still fits."""
_TRIED = 4
"""Groups of one kind that are free first, of which one has to have room."""


@dataclass(slots=True)
class _Machine:
    """A group while nodes join it. devices: that it is taken to have."""

    pool: int
    devices: int
    members: list[int] = field(default_factory=list)


def list_starts(problem: Problem, division: Division, units: Units) -> Iterator[Grouping]:
    """Yield groupings, from one group to as many as there are units or devices."""
    counts: list[int] = []
    count = 1
    while count < len(units):
        counts.append(count)
        count *= 2
    counts.append(len(units))
    pools = range(len(problem.pools))
    choices = [tuple(pools)]
    if len(problem.pools) > 1:
        choices += [(pool,) for pool in pools]
    for chosen in choices:
        for count in counts:
            yield from _list_of(problem, division, units, chosen, count)


def _list_of(
    problem: Problem, division: Division, units: Units, pools: Sequence[int], count: int
) -> Iterator[Grouping]:
    """The list of so many groups, if there is one: in running order, else with those first that
    take most memory.
    """
    by_memory = sorted(units, key=lambda unit: -_least_bytes(problem, unit))
    for ordered in (units, by_memory):
        machines = list(_make_machines(problem, pools, count))
        if len(machines) == count and _join_all(problem, division, ordered, machines):
            groups = [join_members([m.members], m.pool) for m in machines if m.members]
            yield arrange(groups)
            return


def _least_bytes(problem: Problem, unit: tuple[int, ...]) -> int:
    """Bytes that a unit keeps on all devices of some pool, at least."""
    least = 0
    for member in unit:
        sizes: list[int] = []
        for pool, devices in enumerate(problem.pools):
            layouts = problem.nodes[member].prices(pool, devices.devices)
            sizes += [priced.devices * (priced.weights + priced.lasting) for priced in layouts]
        least += min(sizes, default=0)
    return least


def _make_machines(problem: Problem, pools: Sequence[int], count: int) -> Iterator[_Machine]:
    """So many groups, of each pool in proportion to its devices."""
    total = sum(problem.pools[pool].devices for pool in pools)
    begun = 0
    for place, pool in enumerate(pools):
        devices, later = problem.pools[pool].devices, len(pools) - 1 - place
        # Each pool has some, as far as there are enough.
        share = min(max(1, round(count * devices / total)), count - begun - later, devices)
        if not later:
            share = min(count - begun, devices)
        begun += max(0, share)
        for _ in range(max(0, share)):
            yield _Machine(pool, devices // share)


class _Machines:
    """All groups, those of one pool by when they are free."""

    def __init__(self, machines: Sequence[_Machine]) -> None:
        self._heaps: dict[tuple[int, int], list[tuple[float, int]]] = {}
        self._machines = machines
        for number, machine in enumerate(machines):
            heap = self._heaps.setdefault((machine.pool, machine.devices), [])
            heap.append((0.0, number))

    def join(self, division: Division, unit: tuple[int, ...], ready: float) -> float | None:
        """Let a unit join where it ends first, not before it is ready. Returns when that is; None
        where it fits in no group.
        """
        candidates: list[tuple[float, float, int]] = []
        for (pool, devices), heap in self._heaps.items():
            price = division.prices.price(unit, pool, devices)
            if price is not None:
                end = max(ready, heap[0][0]) + price.busy
                candidates.append((end, price.busy, heap[0][1]))
        for _, taken, number in sorted(candidates):
            machine = self._machines[number]
            heap = self._heaps[machine.pool, machine.devices]
            for free, place in heapq.nsmallest(_TRIED, heap):
                chosen = self._machines[place]
                if self._fits(division, chosen, unit):
                    chosen.members += unit
                    end = max(ready, free) + taken
                    heap[heap.index((free, place))] = (end, place)
                    heapq.heapify(heap)
                    return end
        return None

    def _fits(self, division: Division, machine: _Machine, unit: tuple[int, ...]) -> bool:
        if not machine.members or len(machine.members) > _LOOKED_AT:
            return True  # the division will tell
        joined = tuple(sorted((*machine.members, *unit)))
        return division.prices.price(joined, machine.pool, machine.devices) is not None


def _join_all(
    problem: Problem, division: Division, units: Units, machines: Sequence[_Machine]
) -> bool:
    """Let each unit join the group where it ends first; False where one fits in none."""
    ends = [0.0] * len(problem.nodes)
    groups = _Machines(machines)
    for unit in units:
        ready = 0.0
        if not problem.lag:  # else what counts is how much each group has to do
            for member in unit:
                for parent in problem.nodes[member].parents:
                    ready = max(ready, ends[parent])
        end = groups.join(division, unit, ready)
        if end is None:
            return False
        for member in unit:
            ends[member] = end
    return True
