"""Nodes whose replicas come and go, as a plan says by its spare Workers.

Owns: these look-ups. Does not own: which Workers are spare (passes/spare.py), nor when one joins or
leaves (engine/coordinator/replicas.py).
"""

from __future__ import annotations

from engine.plan.plan import Decisions, PlannedNode


def elastic(plan: Decisions) -> tuple[PlannedNode, ...]:
    """Nodes with a Worker that is not there at the beginning."""
    spare = frozenset(plan.spare)
    return tuple(n for n in plan.nodes if spare.intersection(n.workers))


def least(plan: Decisions, node: PlannedNode) -> int:
    """The replicas that an elastic node begins with, and never has less of by its own wish."""
    return len([w for w in node.workers if w not in plan.spare])


def movable(plan: Decisions) -> frozenset[str]:
    """Workers of elastic nodes alone, which may end while the run goes on."""
    nodes = elastic(plan)
    names = {n.name for n in nodes}
    stay = {w for n in plan.nodes if n.name not in names for w in n.workers} | {plan.recorder}
    return frozenset(w for n in nodes for w in n.workers) - stay
