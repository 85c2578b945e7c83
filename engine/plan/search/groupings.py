"""Which nodes share devices: every way for a few nodes, and steps from one way to others.

Owns: both. Does not own: which of them is taken (choice.py), how many devices a group has
(division.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from engine.plan.search.problem import Members

Grouping = tuple[Members, ...]
"""Groups, in the order of their first members."""


def list_groupings(units: Sequence[tuple[int, ...]], pools: int) -> Iterator[Grouping]:
    """Yield every way to divide units of nodes into groups, each on one of so many pools."""
    for partition in _partitions(len(units)):
        for places in itertools.product(range(pools), repeat=len(partition)):
            groups: list[Members] = []
            for part, pool in zip(partition, places, strict=True):
                groups.append(join_members([units[number] for number in part], pool))
            yield arrange(groups)


def count_groupings(units: int, pools: int) -> int:
    """Count the groupings that `list_groupings` yields."""
    # Ways into k groups, for each k: Stirling's numbers of the second kind.
    counts = [1] + [0] * units
    for number in range(1, units + 1):
        for groups in range(number, 0, -1):
            counts[groups] = groups * counts[groups] + counts[groups - 1]
        counts[0] = 0
    return sum(ways * pools**groups for groups, ways in enumerate(counts))


def arrange(groups: Sequence[Members]) -> Grouping:
    """Put groups in the order of their first members, which names a grouping once."""
    return tuple(sorted(groups, key=lambda group: group.members[0]))


def _partitions(count: int) -> Iterator[list[list[int]]]:
    """Every way to divide so many numbers into groups."""
    if not count:
        yield []
        return
    last = count - 1
    for partition in _partitions(last):
        for index, part in enumerate(partition):
            yield [*partition[:index], [*part, last], *partition[index + 1 :]]
        yield [*partition, [last]]


def join_members(units: Sequence[Sequence[int]], pool: int) -> Members:
    """Let units of nodes share devices of a pool."""
    members = itertools.chain.from_iterable(units)
    return Members(tuple(sorted(members)), pool)


def list_steps(
    grouping: Grouping, units: Sequence[tuple[int, ...]], pools: int
) -> Iterator[Grouping]:
    """Yield the groupings that are one step away: a unit in another group or in one of its own, two
    units exchanged, two groups joined, one divided, one on another pool.
    """
    for index, group in enumerate(grouping):
        rest = [*grouping[:index], *grouping[index + 1 :]]
        for pool in range(pools):
            if pool != group.pool:
                yield arrange([*rest, Members(group.members, pool)])
        for other in rest:
            if other.members[0] > group.members[0]:
                remaining = [each for each in rest if each is not other]
                for pool in dict.fromkeys((group.pool, other.pool)):
                    yield arrange([*remaining, join_members([group.members, other.members], pool)])
    yield from _move_units(grouping, units, pools)
    yield from _exchange_units(grouping, units)
    yield from _divide_groups(grouping, units)


def _move_units(
    grouping: Grouping, units: Sequence[tuple[int, ...]], pools: int
) -> Iterator[Grouping]:
    for unit in units:
        index = _find(grouping, unit)
        group = grouping[index]
        if group.members == unit:
            continue
        without = _without(group, unit)
        rest = [*grouping[:index], *grouping[index + 1 :]]
        for pool in range(pools):
            yield arrange([*rest, without, Members(unit, pool)])
        for place, other in enumerate(rest):
            joined = join_members([other.members, unit], other.pool)
            yield arrange([*rest[:place], joined, *rest[place + 1 :], without])


def _exchange_units(grouping: Grouping, units: Sequence[tuple[int, ...]]) -> Iterator[Grouping]:
    for one, other in itertools.combinations(units, 2):
        first, second = grouping[_find(grouping, one)], grouping[_find(grouping, other)]
        if first is second or (first.members == one and second.members == other):
            continue
        rest = [group for group in grouping if group not in (first, second)]
        changed = _exchange(first, one, other), _exchange(second, other, one)
        yield arrange([*rest, *changed])


def _exchange(group: Members, leaving: tuple[int, ...], joining: tuple[int, ...]) -> Members:
    members = [member for member in group.members if member not in leaving]
    return join_members([tuple(members), joining], group.pool)


def _divide_groups(grouping: Grouping, units: Sequence[tuple[int, ...]]) -> Iterator[Grouping]:
    """Groups divided where their units are: the first ones from the last ones."""
    for index, group in enumerate(grouping):
        parts = [unit for unit in units if unit[0] in group.members]
        rest = [*grouping[:index], *grouping[index + 1 :]]
        for cut in range(2, len(parts) - 1):
            halves = join_members(parts[:cut], group.pool), join_members(parts[cut:], group.pool)
            yield arrange([*rest, *halves])


def relieve(
    grouping: Grouping, units: Sequence[tuple[int, ...]], busy: Sequence[int], idle: Sequence[int]
) -> Iterator[Grouping]:
    """Yield the groupings in which a unit of one of the busy groups is in one of the idle ones, or
    in a group of its own; and those in which two idle groups are one. busy, idle: their places.
    """
    for index in busy:
        group = grouping[index]
        rest = [*grouping[:index], *grouping[index + 1 :]]
        parts = [unit for unit in units if unit[0] in group.members]
        for unit in parts if len(parts) > 1 else ():
            without = _without(group, unit)
            yield arrange([*rest, without, Members(unit, group.pool)])
            for place in idle:
                if place != index:
                    other = grouping[place]
                    others = [each for each in rest if each is not other]
                    yield arrange(
                        [*others, without, join_members([other.members, unit], other.pool)]
                    )
    for one, second in itertools.pairwise(idle):
        first, other = grouping[one], grouping[second]
        others = [each for each in grouping if each is not first and each is not other]
        yield arrange([*others, join_members([first.members, other.members], other.pool)])


def _find(grouping: Grouping, unit: tuple[int, ...]) -> int:
    return next(i for i, group in enumerate(grouping) if unit[0] in group.members)


def _without(group: Members, unit: tuple[int, ...]) -> Members:
    return Members(tuple(m for m in group.members if m not in unit), group.pool)
