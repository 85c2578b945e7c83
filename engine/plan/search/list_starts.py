"""Placements from which a search begins: lists in which each node joins the group that ends first.

Owns: these. Does not own: what comes of them (choice.py).

Graham's list scheduling, with groups in the place of machines: for 1, 2, 4, ... groups of equal
numbers of devices, on all pools and on each alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.plan.search.division import Division, Members
from engine.plan.search.groupings import Grouping, arrange
from engine.plan.search.problem import Problem

Units = Sequence[tuple[int, ...]]


@dataclass(slots=True)
class _Machine:
    """A group while nodes join it. devices: that it is taken to have."""

    pool: int
    devices: int
    members: list[int] = field(default_factory=list)
    free: float = 0.0


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
            machines = list(_make_machines(problem, chosen, count))
            if len(machines) == count and _join_all(problem, division, units, machines):
                groups = [Members(tuple(sorted(m.members)), m.pool) for m in machines if m.members]
                yield arrange(groups)


def _make_machines(problem: Problem, pools: Sequence[int], count: int) -> Iterator[_Machine]:
    """So many groups, of each pool in proportion to its devices."""
    total = sum(problem.pools[pool].devices for pool in pools)
    begun = 0
    for place, pool in enumerate(pools):
        devices = problem.pools[pool].devices
        share = round(count * devices / total)
        if place == len(pools) - 1:
            share = count - begun
        share = min(share, devices)
        begun += share
        for _ in range(share):
            yield _Machine(pool, devices // share)


def _join_all(
    problem: Problem, division: Division, units: Units, machines: Sequence[_Machine]
) -> bool:
    """Let each unit join the group where it ends first; False where one fits in none."""
    ends = [0.0] * len(problem.nodes)
    for unit in units:
        ready = 0.0
        for member in unit:
            parents = problem.nodes[member].parents
            ready = max(ready, *(ends[parent] for parent in parents), 0.0)
        if problem.lag:
            ready = 0.0  # what counts is how much each group has to do
        best: tuple[float, _Machine] | None = None
        for machine in machines:
            taken = _seconds_on(division, unit, machine)
            end = max(ready, machine.free) + taken
            if best is None or end < best[0]:
                best = (end, machine)
        if best is None or best[0] == float("inf"):
            return False
        best[1].members += unit
        best[1].free = best[0]
        for member in unit:
            ends[member] = best[0]
    return True


def _seconds_on(division: Division, unit: tuple[int, ...], machine: _Machine) -> float:
    """Seconds of a unit alone on a group's devices."""
    price = division.prices.price(unit, machine.pool, machine.devices)
    return float("inf") if price is None else price.busy
