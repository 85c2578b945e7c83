"""The ways between the Workers of a plan, most of which are alike.

Owns: which are worked out once for all. Does not own: the rates (engine/plan/costs.py).
"""

from __future__ import annotations

from engine.plan.cost.devices import Link
from engine.plan.costs import PlanCosts
from engine.plan.plan import Plan


class Ways:
    """Between the Workers of a plan, each worked out once for Workers of the same kinds."""

    def __init__(self, plan: Plan, costs: PlanCosts) -> None:
        self._plan, self._costs = plan, costs
        self._known: dict[tuple[str, str], Link] = {}
        self._kinds: dict[str, str] = {}

    def kind(self, worker: str) -> str:
        """Workers of one kind have the same ways: its host, and how much of its network it has."""
        if worker not in self._kinds:
            gpus = len(self._plan.devices.get(worker, ()))
            self._kinds[worker] = f"{self._plan.host_of(worker)}/{gpus}"
        return self._kinds[worker]

    def between(self, sender: str, reader: str) -> Link:
        """The way from one Worker to another."""
        kinds = self.kind(sender), self.kind(reader)
        if kinds not in self._known:
            self._known[kinds] = self._costs.link(sender, reader)
        return self._known[kinds]
