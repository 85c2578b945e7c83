"""How long simulated readers take to get a version.

Owns: how many fetch it at once, and from where. Does not own: the formula (engine/plan/cost), who
loads from whom (engine/coordinator/weight_tree.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from engine.plan.costs import PlanCosts
from engine.plan.plan import Plan
from engine.plan.run_limits import FAN_OUT
from engine.protocol import messages as m
from engine.simulation.routes import Ways
from engine.simulation.worker_sets import list_fetching_workers


class LoadTimes:
    """Of the Models of a plan."""

    def __init__(self, plan: Plan, costs: PlanCosts, ways: Ways) -> None:
        self._plan, self._costs, self._ways = plan, costs, ways
        self._fetching = {model.name: list_fetching_workers(plan, model) for model in plan.models}
        self._models = {model.name: model for model in plan.models}
        self._regions = plan.regions
        self._region_of_host = {plan.host_of(w): region for w, region in self._regions.items()}
        self._hosts: dict[tuple[str, frozenset[str]], Counter[str]] = {}
        """(Model, Workers that are away) -> how many fetch it on each host."""
        # What was asked before: the same is asked of each version.
        self._known: dict[tuple[str, str, tuple[str, str], int], float] = {}

    def seconds(self, load: m.Load, away: Set[str]) -> float:
        """Seconds until one reader has a version, while as many as are there fetch it; from a
        source on another host no more than a tree allows. away: Workers that are not there.
        """
        if load.alias or load.leader or load.model not in self._models:
            return 0.0  # at once, or a Table, which is small
        readers = self._count_readers(load, away)
        source, reader = load.source, load.worker
        kinds = self._ways.kind(source), self._ways.kind(reader)
        key = load.model, load.reader, kinds, readers
        if key not in self._known:
            time = self._costs.weights(self._models[load.model], reader, readers, source)
            self._known[key] = time.seconds
        return self._known[key]

    def _count_readers(self, load: m.Load, away: Set[str]) -> int:
        """How many fetch from one source at a time: all on its host, one of each other host of its
        region, and one of each other region.
        """
        absent = self._fetching[load.model] & away
        if (load.model, absent) not in self._hosts:
            workers = self._fetching[load.model] - absent
            self._hosts[load.model, absent] = Counter(map(self._plan.host_of, workers))
        hosts = self._hosts[load.model, absent]
        source = load.source or load.worker
        source_host, source_region = self._plan.host_of(source), self._regions[source]
        if source_host == self._plan.host_of(load.worker):
            return max(1, hosts[source_host])
        regions = [self._region_of_host[host] for host in hosts if host != source_host]
        if source_region == self._regions[load.worker]:
            count = regions.count(source_region)
        else:
            count = len({*regions} - {source_region})
        return min(max(1, count), FAN_OUT)
