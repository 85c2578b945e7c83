"""How long a Step of a placement takes, by the seconds of its nodes.

Owns: what adds up and what overlaps, for groups of nodes that take turns. Does not own: seconds of
nodes (layouts.py), the same of a whole plan (engine/plan/step_price.py), by which the best few are
compared.

Without a lag a Step is the time from its first node to the last, and until weights are back. With a
lag of k it is that of the busiest group, or of the whole way over 1 + k, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan.search.group_price import GroupPrice
from engine.plan.search.problem import Group, Problem


class StepTimes:
    """Seconds of Steps, by the groups of a placement and the price of each."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._parents = [node.parents for node in problem.nodes]
        self._trains = [node.trains for node in problem.nodes]
        self._readers = [i for i, node in enumerate(problem.nodes) if node.writer >= 0]

    def seconds(self, groups: Sequence[Group], prices: Sequence[GroupPrice]) -> float:
        """Seconds of a Step."""
        problem = self._problem
        count = len(self._parents)
        group_of, seconds = [0] * count, [0.0] * count
        for number, (group, price) in enumerate(zip(groups, prices, strict=True)):
            share = price.turns / len(group.members)
            for member, taken in zip(group.members, price.seconds, strict=True):
                group_of[member] = number
                seconds[member] = taken + share
        fetching = self._fetching(groups, group_of)
        way = self._schedule(group_of, seconds, len(groups))
        way += max(fetching.values(), default=0.0) + problem.overhead
        if not problem.lag:
            return way
        busiest = 0.0
        for number, price in enumerate(prices):
            busiest = max(busiest, price.busy + fetching.get(number, 0.0))
        return max(busiest, way / (1 + problem.lag))

    def _schedule(self, group_of: list[int], seconds: list[float], group_count: int) -> float:
        """Seconds from a Step's first node to the end of its last."""
        free = [0.0] * group_count
        ends = [0.0] * len(seconds)
        last = 0.0
        for node, taken in enumerate(seconds):
            group = group_of[node]
            begin = free[group]
            if self._trains[node]:
                # Train nodes have their turns once all rows of the Step are there.
                if last > begin:
                    begin = last
            else:
                for parent in self._parents[node]:
                    if ends[parent] > begin:
                        begin = ends[parent]
            end = begin + taken
            ends[node] = free[group] = end
            if end > last:
                last = end
        return last

    def _fetching(self, groups: Sequence[Group], group_of: list[int]) -> dict[int, float]:
        """Seconds in which each group takes in new weights, of each Model once."""
        models: dict[tuple[int, int], float] = {}
        for member in self._readers:
            node = self._problem.nodes[member]
            reader, writer = group_of[member], group_of[node.writer]
            if reader != writer:
                pools = groups[writer].pool, groups[reader].pool
                models[reader, node.writer] = self._problem.way(*pools, node.version)
        fetching: dict[int, float] = {}
        for (reader, _), taken in models.items():
            fetching[reader] = fetching.get(reader, 0.0) + taken
        return fetching
