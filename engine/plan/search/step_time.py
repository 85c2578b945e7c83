"""How long a Step of a placement takes, by the seconds of its nodes.

Owns: what adds up and what overlaps, for groups of nodes that take turns. Does not own: seconds of
nodes (layouts.py), the same of a whole plan (engine/plan/step_price.py), by which the best few are
compared.

Without a lag a Step is the time from its first node to the last, and until weights are back. With a
lag of k it is that of the busiest group, or of the whole way over 1 + k, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from engine.plan.search.group_price import GroupPrice
from engine.plan.search.problem import Members, Problem


class PlacementTimes:
    """Seconds of Steps, by the device groups of a placement and the price of each."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        # Train nodes have their turns once all rows of the Step are there.
        self._parents = [None if node.trains else node.parents for node in problem.nodes]
        self._readers = [i for i, node in enumerate(problem.nodes) if node.writer >= 0]
        self._grouping: Sequence[Members] = ()
        self._group_of: list[int] = []
        self._members: list[int] = []
        self._fetching: dict[int, float] = {}

    def seconds(self, grouping: Sequence[Members], prices: Sequence[GroupPrice]) -> float:
        """Seconds of a Step."""
        if grouping is not self._grouping:
            self._read(grouping)
        seconds = [0.0] * len(self._group_of)
        in_order = chain.from_iterable([price.seconds for price in prices])
        for member, taken in zip(self._members, in_order, strict=True):
            seconds[member] = taken
        way = self._schedule(seconds, len(grouping) + len(seconds))
        way += max(self._fetching.values(), default=0.0)
        lag = self._problem.lag
        return max(self.busiest(grouping, prices), way / (1 + lag)) if lag else way

    def busiest(self, grouping: Sequence[Members], prices: Sequence[GroupPrice]) -> float:
        """Seconds of the group that takes longest, with those in which it takes in weights."""
        if grouping is not self._grouping:
            self._read(grouping)
        busiest = max([price.busy for price in prices])
        for number, fetched in self._fetching.items():
            busiest = max(busiest, prices[number].busy + fetched)
        return busiest

    def _read(self, grouping: Sequence[Members]) -> None:
        """Note the group of each node; many divisions of one grouping are timed. A node that is in
        no group takes no time, and waits for no group.
        """
        nodes = len(self._problem.nodes)
        group_of = list(range(len(grouping), len(grouping) + nodes))
        for number, group in enumerate(grouping):
            for member in group.members:
                group_of[member] = number
        self._grouping, self._group_of = grouping, group_of
        self._members = list(chain.from_iterable(group.members for group in grouping))
        self._fetching = self._time_fetching()

    def _schedule(self, seconds: Sequence[float], group_count: int) -> float:
        """Seconds from a Step's first node to the end of its last."""
        free = [0.0] * group_count
        ends: list[float] = []
        last = 0.0
        add_end = ends.append
        # One turn of this loop for each node of each placement: it is what a search takes.
        for group, parents, taken in zip(self._group_of, self._parents, seconds, strict=True):
            begin = free[group]
            if parents is None:
                if last > begin:
                    begin = last
            else:
                for parent in parents:
                    if ends[parent] > begin:
                        begin = ends[parent]
            begin += taken
            add_end(begin)
            free[group] = begin
            if begin > last:
                last = begin
        return last

    def _time_fetching(self) -> dict[int, float]:
        """Seconds in which each group takes in new weights, of each Model once."""
        models: dict[tuple[int, int], float] = {}
        for member in self._readers:
            node = self._problem.nodes[member]
            reader, writer = self._group_of[member], self._group_of[node.writer]
            if reader != writer and max(reader, writer) < len(self._grouping):
                pools = self._grouping[writer].pool, self._grouping[reader].pool
                models[reader, node.writer] = self._problem.way(*pools, node.version)
        fetching: dict[int, float] = {}
        for (reader, _), taken in models.items():
            fetching[reader] = fetching.get(reader, 0.0) + taken
        return fetching
