"""The graph of a plan, for what its lines tell beyond the plan's own fields.

Owns: looking a Model up in it. Does not own: the plan (engine/plan/plan.py).
"""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.model import Model
from engine.plan.plan import Plan


def planned_graph(plan: Plan) -> Graph:
    """The graph of a plan that the planner has made."""
    assert plan.program is not None
    return plan.program


def planned_model(plan: Plan, name: str) -> Model | None:
    """The Model of that name; None for a plan without a graph."""
    if plan.program is None:
        return None
    for state in plan.program.states:
        if isinstance(state, Model) and state.name == name:
            return state
    return None
