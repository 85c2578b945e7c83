"""Runs of a plan in the simulator."""

from __future__ import annotations

from engine.coordinator.coordinator import Settings
from engine.plan.plan import Plan
from engine.run.simulated_workers.behaviour import Durations, Outcomes
from engine.run.simulated_workers.faults import FaultModel
from engine.run.simulated_workers.simulation import Simulation


def simulation(
    plan: Plan,
    *,
    settings: Settings,
    rows: int = 50,
    durations: Durations | None = None,
    outcomes: Outcomes | None = None,
    faults: FaultModel | None = None,
) -> Simulation:
    """A run of sources with this many rows."""
    sources = {source.name: rows for source in plan.sources}
    return Simulation(
        plan,
        settings,
        rows=sources,
        durations=durations or Durations(),
        outcomes=outcomes or Outcomes(),
        faults=faults,
    )
