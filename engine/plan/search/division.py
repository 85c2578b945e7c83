"""How many devices each group of nodes has.

Owns: the division for a given grouping. Does not own: which nodes share devices (groupings.py),
prices of groups (group_price.py).

With a lag the slowest group decides: bisection on its seconds finds the least for which all groups
together need no more devices than there are, which is exact where more devices never take longer.
Without one a Step's nodes wait for one another, and every division is tried; where these are too
many, devices go from group to group as long as a Step becomes shorter.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from engine.plan.search.group_price import GroupPrice, GroupPrices
from engine.plan.search.problem import DeviceGroup, Members, Placement, PricedLayout, Problem
from engine.plan.search.step_time import PlacementTimes

_MOST_DIVISIONS = 256
"""That are tried one by one."""
_ALL_SIZES = 32
"""Devices of a pool up to which a group may have any number of them."""
_GROWTH = 1.15
"""From one number of devices to the next, where there are more."""
_LEAST_GAIN = 1e-4
"""Of a Step: less is none."""
_ROUNDS = 64
"""Of devices that go from group to group."""
_MANY_GROUPS = 24
"""From which on none go: what one group has then is little to any other."""


@dataclass(frozen=True, slots=True)
class _Size:
    """A number of devices that is worth having: the group is faster than with any fewer."""

    devices: int
    price: GroupPrice


class Division:
    """Divides the devices of pools among groups."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.prices = GroupPrices(problem)
        self.times = PlacementTimes(problem)
        self.count = 0
        """Placements that were priced."""
        self._sizes = [list(_list_sizes(pool.devices, pool.per_host)) for pool in problem.pools]
        self._curves: dict[Members, list[_Size]] = {}
        self._alike: dict[tuple[object, ...], list[_Size]] = {}
        """Curves of groups whose members are alike."""

    def curve(self, members: Members) -> list[_Size]:
        """The numbers of devices that are worth having, ascending; empty where none fits."""
        curve = self._curves.get(members)
        if curve is None:
            most = max(self.problem.nodes[member].most for member in members.members)
            key = (self.prices.signature(members.members), members.pool, most)
            if key not in self._alike:
                self._alike[key] = list(self._find_curve(members, most))
            curve = self._curves[members] = self._alike[key]
        return curve

    def _find_curve(self, members: Members, most: int) -> Iterator[_Size]:
        fastest = float("inf")
        for devices in self._sizes[members.pool]:
            price = self.prices.price(members.members, members.pool, devices)
            if price is not None and price.busy < fastest * (1.0 - _LEAST_GAIN):
                fastest = price.busy
                yield _Size(devices, price)
            if devices >= most:
                break

    def bound(self, grouping: Sequence[Members]) -> float:
        """Seconds of a Step if each group had all devices of its pool; infinite where one fits on
        none. Of no division of this grouping a Step is shorter.
        """
        curves = [self.curve(members) for members in grouping]
        if not all(curves):
            return float("inf")
        return self._seconds(grouping, [curve[-1] for curve in curves])

    def divide(self, grouping: Sequence[Members]) -> Placement | None:
        """The best division; None where the groups do not fit."""
        sizes = self._choose_sizes(grouping)
        return None if sizes is None else self._make(grouping, sizes)

    def least_score(self, grouping: Sequence[Members]) -> float:
        """Seconds, or cost, of a Step of the nodes in these groups alone, which need not be all;
        infinite where these do not fit. Where there are many divisions, that of the bisection.
        """
        sizes = self._choose_sizes(grouping, improves=False)
        return float("inf") if sizes is None else self._score(grouping, sizes)

    def _choose_sizes(
        self, grouping: Sequence[Members], *, improves: bool = True
    ) -> list[_Size] | None:
        """What each group has in the best division; None where they do not fit."""
        curves = [self.curve(members) for members in grouping]
        if not all(curves) or not self._have_devices(grouping, [curve[0] for curve in curves]):
            return None
        sizes: list[_Size] | None = None
        few = prod(map(len, curves)) <= _MOST_DIVISIONS
        if not few or self.problem.lag:
            sizes = self._begin(grouping, curves)
            if few and not self._is_least(grouping, sizes):
                sizes = None
            elif not few and improves and len(grouping) < _MANY_GROUPS:
                sizes = self._improve(grouping, curves, sizes)
        if sizes is None:
            sizes = self._try_all(grouping, curves)
        return sizes if self._fits(grouping, sizes) else None

    def _is_least(self, grouping: Sequence[Members], sizes: Sequence[_Size]) -> bool:
        """Whether a Step is as long as the slowest group of a bisection, and so as short as any."""
        if self.problem.objective == "cost" or not self._fits(grouping, sizes):
            return False
        return self._seconds(grouping, sizes) <= max(size.price.busy for size in sizes)

    def _begin(self, grouping: Sequence[Members], curves: Sequence[list[_Size]]) -> list[_Size]:
        """The division that is exact with a lag and falling curves."""
        # Groups that are alike have one curve.
        distinct = {id(curve): curve for curve in curves}.values()
        targets = sorted({size.price.busy for size in itertools.chain.from_iterable(distinct)})
        sizes = [curve[0] for curve in curves]
        low, high = 0, len(targets) - 1
        best = float("inf")
        if self.problem.objective == "cost":
            for target in targets[:: max(1, len(targets) // _MOST_DIVISIONS)]:
                tried = _sizes_for(curves, target)
                if tried is not None and self._fits(grouping, tried):
                    score = self._score(grouping, tried)
                    if score < best:
                        best, sizes = score, tried
            return sizes
        while low <= high:
            middle = (low + high) // 2
            tried = _sizes_for(curves, targets[middle])
            if tried is not None and self._fits(grouping, tried):
                sizes, high = tried, middle - 1
            else:
                low = middle + 1
        return sizes

    def _try_all(self, grouping: Sequence[Members], curves: Sequence[list[_Size]]) -> list[_Size]:
        best = [curve[0] for curve in curves]
        best_key = (float("inf"), 0)
        for sizes in itertools.product(*curves):
            if self._fits(grouping, sizes):
                key = (self._score(grouping, sizes), sum(size.devices for size in sizes))
                if key < best_key:
                    best, best_key = list(sizes), key
        return best

    def _improve(
        self, grouping: Sequence[Members], curves: Sequence[list[_Size]], sizes: list[_Size]
    ) -> list[_Size]:
        """Let devices go from group to group, or to one that none has, while a Step is shortened;
        then take back those that are worth nothing.
        """
        score = self._score(grouping, sizes)
        for _ in range(_ROUNDS):
            best: list[_Size] | None = None
            for tried in _neighbours(grouping, curves, sizes):
                if self._fits(grouping, tried):
                    tried_score = self._score(grouping, tried)
                    if tried_score < score * (1.0 - _LEAST_GAIN):
                        best, score = tried, tried_score
            if best is None:
                break
            sizes = best
        for index, curve in enumerate(curves):
            for smaller in curve:
                if smaller.devices >= sizes[index].devices:
                    break
                tried = [*sizes[:index], smaller, *sizes[index + 1 :]]
                if self._score(grouping, tried) <= score * (1.0 + _LEAST_GAIN):
                    sizes = tried
                    break
        return sizes

    def _fits(self, grouping: Sequence[Members], sizes: Sequence[_Size]) -> bool:
        """Whether there are as many devices, and as much memory of hosts."""
        if not self._have_devices(grouping, sizes):
            return False
        waiting = [0] * len(self.problem.pools)
        for members, size in zip(grouping, sizes, strict=True):
            waiting[members.pool] += size.price.waiting
        for pool, size_on_hosts in zip(self.problem.pools, waiting, strict=True):
            if pool.host_memory and size_on_hosts > pool.devices * pool.host_memory:
                return False
        return True

    def _have_devices(self, grouping: Sequence[Members], sizes: Sequence[_Size]) -> bool:
        free = [pool.devices for pool in self.problem.pools]
        for members, size in zip(grouping, sizes, strict=True):
            free[members.pool] -= size.devices
        return min(free) >= 0

    def _seconds(self, grouping: Sequence[Members], sizes: Sequence[_Size]) -> float:
        self.count += 1
        return self.times.seconds(grouping, [size.price for size in sizes])

    def _score(self, grouping: Sequence[Members], sizes: Sequence[_Size]) -> float:
        """What is to be least."""
        seconds = self._seconds(grouping, sizes)
        if self.problem.objective == "seconds":
            return seconds
        return seconds * self._price_of(grouping, sizes)

    def _price_of(self, grouping: Sequence[Members], sizes: Sequence[_Size]) -> float:
        """Of a second. Hosts are paid whole, however many of their devices are used."""
        devices = [0] * len(self.problem.pools)
        for members, size in zip(grouping, sizes, strict=True):
            devices[members.pool] += size.devices
        price = 0.0
        for pool, used in zip(self.problem.pools, devices, strict=True):
            hosts = -(-used // pool.per_host)
            price += pool.price * min(pool.devices, hosts * pool.per_host)
        return price / 3600.0

    def _make(self, grouping: Sequence[Members], sizes: Sequence[_Size]) -> Placement:
        layouts: dict[int, PricedLayout] = {}
        groups: list[DeviceGroup] = []
        for members, size in zip(grouping, sizes, strict=True):
            layouts |= dict(zip(members.members, size.price.layouts, strict=True))
            group = DeviceGroup(members=members.members, pool=members.pool, devices=size.devices)
            groups.append(group)
        seconds = self._seconds(grouping, sizes)
        return Placement(
            groups=tuple(groups),
            layouts=tuple(layouts[number] for number in sorted(layouts)),
            seconds=seconds,
            cost=seconds * self._price_of(grouping, sizes),
        )


def _list_sizes(devices: int, per_host: int) -> Iterator[int]:
    """Numbers of devices that are tried: all small ones, then whole hosts, ever further apart."""
    size = 1
    while size <= devices:
        yield size
        following = size + 1
        if size >= _ALL_SIZES:
            following = max(size + per_host, int(size * _GROWTH))
            following -= following % per_host
        if size < devices < following:
            following = devices
        size = following


def _sizes_for(curves: Sequence[list[_Size]], target: float) -> list[_Size] | None:
    """The fewest devices of each group with which it takes no longer than `target` seconds."""
    sizes: list[_Size] = []
    size_of: dict[int, _Size] = {}
    for curve in curves:
        size = size_of.get(id(curve))
        if size is None:
            # Seconds fall along a curve.
            index = bisect_left(curve, -target, key=_negative_busy)
            if index == len(curve):
                return None
            size = size_of[id(curve)] = curve[index]
        sizes.append(size)
    return sizes


def _negative_busy(size: _Size) -> float:
    return -size.price.busy


def _neighbours(
    grouping: Sequence[Members], curves: Sequence[list[_Size]], sizes: list[_Size]
) -> Iterator[list[_Size]]:
    """Divisions in which one group has more devices, or one more and another fewer."""
    places = [curve.index(size) for curve, size in zip(curves, sizes, strict=True)]
    for grown, place in enumerate(places):
        for bigger in curves[grown][place + 1 : place + 3]:
            changed = [*sizes]
            changed[grown] = bigger
            yield changed
            for shrunk, other in enumerate(places):
                is_of_pool = grouping[shrunk].pool == grouping[grown].pool
                if shrunk != grown and other and is_of_pool:
                    both = [*changed]
                    both[shrunk] = curves[shrunk][other - 1]
                    yield both
