"""Which layouts nodes that share devices have together, so that all fit in their memory.

Owns: the choice for one group, and its price. Does not own: prices of one node's layouts
(layouts.py), how many devices a group has (division.py).

Nodes of one group take turns. A device holds the weights of each Model once for each part, what
nodes keep, and what one of them needs while it runs. Workers of kernels that have one to themselves
sleep while others compute: then a device holds what the Worker that is awake needs, and their
weights come and go with each turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from engine.plan.search.problem import PricedLayout, Problem

_MOST_COMBINATIONS = 4096
"""Of layouts of a group's members, times these; where there are more, layouts grow one by one."""


@dataclass(frozen=True, slots=True)
class GroupPrice:
    """layouts, seconds: of each member, in its order. busy: seconds of all in a Step, one after
    another. turns: of these, those in which weights come and go.
    """

    layouts: tuple[PricedLayout, ...]
    seconds: tuple[float, ...]
    busy: float
    turns: float = 0.0


class GroupPrices:
    """Prices of groups on so many devices, each of which is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.count = 0
        """Prices that were worked out."""
        self.price = lru_cache(maxsize=1 << 18)(self._price)

    def _price(self, members: tuple[int, ...], pool: int, devices: int) -> GroupPrice | None:
        """The price of a group; None where it does not fit. Fewer devices than the group has may be
        used, but never more.
        """
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
        return GroupPrice(layouts, seconds, turns + sum(seconds), turns)

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
        return self._need(members, layouts) <= self._problem.pools[pool].memory

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

    def _turn_seconds(self, members: tuple[int, ...], layouts: Sequence[PricedLayout]) -> float:
        """Seconds in which weights go to the host and come back, where Workers take turns."""
        nodes, rate = self._problem.nodes, self._problem.turn_rate
        alone = [nodes[member].is_alone for member in members]
        if not rate or not any(alone) or all(alone):
            return 0.0
        size = sum(priced.weights + priced.lasting for priced in layouts)
        return 2.0 * size / rate


def _gain_of(entry: tuple[float, int, PricedLayout]) -> float:
    return entry[0]


def _seconds_of(priced: PricedLayout) -> float:
    return priced.seconds


def _bytes_of(priced: PricedLayout) -> int:
    return priced.weights + priced.lasting + priced.running
