"""How long simulated readers take to get a version.

Owns: how many fetch it at once, and from where. Does not own: the formula (engine/plan/cost), who
loads from whom (engine/coordinator/weight_tree.py).
"""

from __future__ import annotations

from collections.abc import Set

from engine.coordinator.weight_tree import FAN_OUT
from engine.plan.costs import PlanCosts
from engine.plan.plan import Plan, PlannedModel
from engine.predict.simulation.routes import Ways
from engine.protocol import messages as m


class LoadTimes:
    """Of the Models of a plan."""

    def __init__(self, plan: Plan, costs: PlanCosts, ways: Ways) -> None:
        self._plan, self._costs, self._ways = plan, costs, ways
        self._fetching = {model.name: _fetching_workers(plan, model) for model in plan.models}
        self._models = {model.name: model for model in plan.models}
        # What was asked before: the same is asked of each version.
        self._known: dict[tuple[str, str, tuple[str, str], int], float] = {}

    def seconds(self, load: m.Load, away: Set[str]) -> float:
        """Seconds until one reader has a version, while as many as are there fetch it; from a
        source on another host no more than a tree allows. away: Workers that are not there.
        """
        if load.alias or load.leader:
            return 0.0
        workers = self._fetching[load.model]
        readers = max(1, len(workers) - len(workers & away))
        source, reader = load.source, load.worker
        if source and self._plan.host_of(source) != self._plan.host_of(reader):
            readers = min(readers, FAN_OUT)
        kinds = self._ways.kind(source), self._ways.kind(reader)
        key = load.model, load.reader, kinds, readers
        if key not in self._known:
            time = self._costs.weights(self._models[load.model], reader, readers, source)
            self._known[key] = time.seconds
        return self._known[key]


def _fetching_workers(plan: Plan, model: PlannedModel) -> frozenset[str]:
    """Workers that fetch each version of a Model; the writer's first rank offers it."""
    workers: set[str] = set()
    for reader in model.copying_readers:
        workers.update(plan.node(reader).workers)
    if model.writer:
        workers.discard(plan.node(model.writer).workers[0])
    return frozenset(workers)
