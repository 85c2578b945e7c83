"""Nodes whose replicas come and go, as a plan says by its spare Workers.

Owns: these look-ups. Does not own: which Workers are spare (passes/spare.py), nor when one joins or
leaves (engine/coordinator/replicas.py).
"""

from __future__ import annotations

from engine.plan.plan import Decisions, PlannedNode


def elastic_nodes(plan: Decisions) -> tuple[PlannedNode, ...]:
    """Nodes with a Worker that is not there at the beginning."""
    spare = frozenset(plan.spare)
    return tuple(node for node in plan.nodes if not spare.isdisjoint(node.workers))


def least_replicas(plan: Decisions, node: PlannedNode) -> int:
    """The replicas that an elastic node begins with, and never has less of by its own wish."""
    return sum(worker not in plan.spare for worker in node.workers)


def movable_workers(plan: Decisions) -> frozenset[str]:
    """Workers of elastic nodes alone, which may end while the run goes on."""
    elastic_names = {node.name for node in elastic_nodes(plan)}
    movable: set[str] = set()
    fixed = {plan.recorder}
    for node in plan.nodes:
        if node.name in elastic_names:
            movable.update(node.workers)
        else:
            fixed.update(node.workers)
    return frozenset(movable - fixed)
