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
        self._nodes = problem.nodes
        self._parents = [node.parents for node in problem.nodes]
        self._trains = [node.trains for node in problem.nodes]

    def seconds(self, groups: Sequence[Group], prices: Sequence[GroupPrice]) -> float:
        """Seconds of a Step."""
        problem = self._problem
        fetching = self._fetching(groups)
        way = self._way(groups, prices) + max(fetching, default=0.0) + problem.overhead
        if not problem.lag:
            return way
        busiest = 0.0
        for price, fetched in zip(prices, fetching, strict=True):
            busiest = max(busiest, price.busy + fetched)
        return max(busiest, way / (1 + problem.lag))

    def _way(self, groups: Sequence[Group], prices: Sequence[GroupPrice]) -> float:
        """Seconds from a Step's first node to the end of its last."""
        count = len(self._nodes)
        group_of, seconds = [0] * count, [0.0] * count
        for number, (group, price) in enumerate(zip(groups, prices, strict=True)):
            share = price.turns / len(group.members)
            for member, priced in zip(group.members, price.layouts, strict=True):
                group_of[member] = number
                seconds[member] = priced.seconds + share
        return self._schedule(group_of, seconds, len(groups))

    def _schedule(self, group_of: list[int], seconds: list[float], group_count: int) -> float:
        free = [0.0] * group_count
        ends = [0.0] * len(seconds)
        last = 0.0
        parents, trains = self._parents, self._trains
        for node, taken in enumerate(seconds):
            group = group_of[node]
            begin = free[group]
            if trains[node]:
                # Train nodes have their turns once all rows of the Step are there.
                begin = max(begin, last)
            else:
                for parent in parents[node]:
                    if ends[parent] > begin:
                        begin = ends[parent]
            end = begin + taken
            ends[node] = free[group] = end
            if end > last:
                last = end
        return last

    def _fetching(self, groups: Sequence[Group]) -> list[float]:
        """Seconds in which each group takes in new weights, of each Model once."""
        group_of: dict[int, Group] = {}
        for group in groups:
            group_of |= dict.fromkeys(group.members, group)
        fetching: list[float] = []
        for group in groups:
            models: dict[int, float] = {}
            for member in group.members:
                node = self._nodes[member]
                if node.writer < 0:
                    continue
                writer = group_of[node.writer]
                if writer is not group:
                    models[node.writer] = self._problem.way(writer.pool, group.pool, node.version)
            fetching.append(sum(models.values()))
        return fetching
