"""Runs of a plan in the simulator, begun."""

from __future__ import annotations

from engine.coordinator.core import Settings
from engine.plan.plan import Plan
from engine.simulate.behaviour import Outcomes, Timing
from engine.simulate.workers import Simulation


def simulation(
    plan: Plan,
    *,
    settings: Settings,
    rows: int = 50,
    timing: Timing | None = None,
    outcomes: Outcomes | None = None,
) -> Simulation:
    """A run that has begun, of sources with so many rows."""
    sources = {source.name: rows for source in plan.sources}
    run = Simulation(
        plan, settings, rows=sources, timing=timing or Timing(), outcomes=outcomes or Outcomes()
    )
    run.begin()
    return run
