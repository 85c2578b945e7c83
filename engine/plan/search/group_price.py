"""Which layouts nodes that share devices have together, so that all fit in their memory.

Owns: the choice for one group, and its price. Does not own: prices of one node's layouts
(layouts.py), how many devices a group has (division.py).

Nodes of one group take turns. A device holds the weights of each Model once for each part, what
nodes keep, and what one of them needs while it runs. Workers of kernels that have one to themselves
sleep while others compute: then a device holds what the Worker that is awake needs, and their
weights come and go with each turn. A host has what its devices' Workers leave there: all that lasts
where they take turns, and state and weights that always wait there.

Nodes with the same prices are alike: one price is worked out for all groups of such nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from engine.plan.search.problem import PricedLayout, Problem

_MOST_COMBINATIONS = 4096
"""Of layouts of a group's members, times these; where there are more, layouts grow one by one."""


@dataclass(frozen=True, slots=True)
class GroupPrice:
    """layouts, seconds: of each member, in its order; each has its part of `turns`, in which
    weights come and go. busy: seconds of all in a Step, one after another. waiting: bytes in host
    memory, of all devices; 0 where that has no bound.
    """

    layouts: tuple[PricedLayout, ...]
    seconds: tuple[float, ...]
    busy: float
    turns: float = 0.0
    waiting: int = 0


class GroupPrices:
    """Prices of groups on so many devices, each of which is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.count = 0
        """Prices that were worked out."""
        kinds: dict[tuple[object, ...], int] = {}
        self._kinds: list[int] = []
        """Of each node; nodes with the same prices are of one kind."""
        for node in problem.nodes:
            # Prices by identity: equal functions are one, as nodes of equal work share them.
            prices = id(node.prices), id(node.beside_training)
            kind = (*prices, node.trains, node.is_alone, node.pinned)
            self._kinds.append(kinds.setdefault(kind, len(kinds)))
        self._by_kinds: dict[tuple[object, ...], GroupPrice | None] = {}
        self._signatures: dict[tuple[int, ...], tuple[object, ...]] = {}

    def price(self, members: tuple[int, ...], pool: int, devices: int) -> GroupPrice | None:
        """The price of a group; None where it does not fit. Fewer devices than the group has may be
        used, but never more.
        """
        key = (self.signature(members), pool, devices)
        if key not in self._by_kinds:
            self._by_kinds[key] = self._price(members, pool, devices)
        return self._by_kinds[key]

    def signature(self, members: tuple[int, ...]) -> tuple[object, ...]:
        """What a group's prices depend on: equal for groups of nodes that are alike, in order."""
        if members not in self._signatures:
            models: dict[object, int] = {}
            parts: list[object] = []
            for member in members:
                model = models.setdefault(self._problem.nodes[member].model, len(models))
                parts.append((self._kinds[member], model))
            self._signatures[members] = tuple(parts)
        return self._signatures[members]

    def _price(self, members: tuple[int, ...], pool: int, devices: int) -> GroupPrice | None:
        self.count += 1
        nodes = [self._problem.nodes[member] for member in members]
        if len({node.pinned for node in nodes if node.pinned}) > 1:
            return None
        trains = any(node.trains for node in nodes)
        choices: list[Sequence[PricedLayout]] = []
        for node in nodes:
            prices = node.beside_training if trains else None
            choices.append((prices or node.prices)(pool, devices))
        if not all(choices):
            return None
        layouts = self._choose(members, pool, choices)
        if layouts is None:
            return None
        turns = self._turn_seconds(members, layouts)
        seconds = tuple(map(_seconds_of, layouts))
        busy = turns + sum(seconds)
        if turns:
            seconds = tuple(taken + turns / len(members) for taken in seconds)
        waiting = 0
        if self._problem.pools[pool].host_memory:
            waiting = self._need_on_hosts(members, layouts)
        return GroupPrice(layouts, seconds, busy, turns, waiting)

    def _choose(
        self, members: tuple[int, ...], pool: int, choices: Sequence[Sequence[PricedLayout]]
    ) -> tuple[PricedLayout, ...] | None:
        """The layouts that take the least seconds and fit."""
        fastest = tuple(each[0] for each in choices)
        if self._fits(members, pool, fastest):
            return fastest
        smallest = [min(each, key=_bytes_of) for each in choices]
        if len(members) * prod(map(len, choices)) > _MOST_COMBINATIONS:
            return self._grow(members, pool, choices, smallest)
        best: tuple[PricedLayout, ...] | None = None
        best_seconds = float("inf")
        for layouts in itertools.product(*choices):
            seconds = sum(map(_seconds_of, layouts))
            if seconds < best_seconds and self._fits(members, pool, layouts):
                best, best_seconds = layouts, seconds
        return best

    def _grow(
        self,
        members: tuple[int, ...],
        pool: int,
        choices: Sequence[Sequence[PricedLayout]],
        smallest: Sequence[PricedLayout],
    ) -> tuple[PricedLayout, ...] | None:
        """From the smallest layouts, change one after another to a faster one, first those that
        gain most for their bytes, as long as all fit.
        """
        present = list(smallest)
        if not self._fits(members, pool, present):
            return None
        gains: list[tuple[float, int, PricedLayout]] = []
        for index, (slowest, layouts) in enumerate(zip(smallest, choices, strict=True)):
            for priced in layouts:
                more = _bytes_of(priced) - _bytes_of(slowest)
                if priced.seconds < slowest.seconds:
                    gain = (slowest.seconds - priced.seconds) / max(1, more)
                    gains.append((gain, index, priced))
        gains.sort(key=_gain_of, reverse=True)
        for _, index, priced in gains:
            before = present[index]
            if priced.seconds < before.seconds:
                present[index] = priced
                if not self._fits(members, pool, present):
                    present[index] = before
        return tuple(present)

    def _fits(self, members: tuple[int, ...], pool: int, layouts: Sequence[PricedLayout]) -> bool:
        room = self._problem.pools[pool]
        if self._need(members, layouts) > room.memory:
            return False
        if not room.host_memory:
            return True
        # A group may have more of a host's memory than its devices' part of it.
        return self._need_on_hosts(members, layouts) <= room.devices * room.host_memory

    def _need(self, members: tuple[int, ...], layouts: Sequence[PricedLayout]) -> int:
        """Bytes of each device: of the Worker that needs most, as the others sleep then."""
        nodes = self._problem.nodes
        weights: dict[object, int] = {}
        lasting = running = alone = 0
        for member, priced in zip(members, layouts, strict=True):
            node = nodes[member]
            if node.is_alone:
                alone = max(alone, priced.weights + priced.lasting + priced.running)
                continue
            weights[node.model, priced.part] = priced.weights
            lasting += priced.lasting
            running = max(running, priced.running)
        return max(alone, sum(weights.values()) + lasting + running)

    def _need_on_hosts(self, members: tuple[int, ...], layouts: Sequence[PricedLayout]) -> int:
        """Bytes that all devices leave in host memory: what always waits there, and what lasts of
        Workers that take turns, which goes there while they sleep. They do so one with another.
        """
        widths = {True: 0, False: 0}
        for member, priced in zip(members, layouts, strict=True):
            is_alone = self._problem.nodes[member].is_alone
            widths[is_alone] = max(widths[is_alone], priced.devices)
        pairs = min(widths.values())
        shared: dict[object, int] = {}
        lasting = 0
        for member, priced in zip(members, layouts, strict=True):
            node, asleep = self._problem.nodes[member], min(pairs, priced.devices)
            size = priced.waiting * priced.devices + priced.weights * asleep
            key = (node.model, priced.part, node.is_alone)
            shared[key] = max(size, shared.get(key, 0))
            lasting += priced.lasting * asleep
        return sum(shared.values()) + lasting

    def _takes_turns(self, members: tuple[int, ...]) -> bool:
        """Whether some of a group's Workers sleep while others compute."""
        alone = [self._problem.nodes[member].is_alone for member in members]
        return any(alone) and not all(alone)

    def _turn_seconds(self, members: tuple[int, ...], layouts: Sequence[PricedLayout]) -> float:
        """Seconds in which weights go to the host and come back, where Workers take turns."""
        rate = self._problem.turn_rate
        if not rate or not self._takes_turns(members):
            return 0.0
        size = sum(priced.weights + priced.lasting for priced in layouts)
        return 2.0 * size / rate


def _gain_of(entry: tuple[float, int, PricedLayout]) -> float:
    return entry[0]


def _seconds_of(priced: PricedLayout) -> float:
    return priced.seconds


def _bytes_of(priced: PricedLayout) -> int:
    return priced.weights + priced.lasting + priced.running
