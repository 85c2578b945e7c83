"""Workers of a plan that do something at the same time.

Owns: who fetches a Model's versions, and which nodes compute while others do. Does not own: what
that does to their times (priced_times.py).
"""

from __future__ import annotations

from engine.plan.plan import Plan, PlannedModel, PlannedNode


def list_fetching_workers(plan: Plan, model: PlannedModel) -> frozenset[str]:
    """Workers that fetch each version of a Model; the writer's first rank offers it."""
    workers: set[str] = set()
    for reader in model.copying_readers:
        workers.update(plan.node(reader).workers)
    if model.writer:
        workers.discard(plan.node(model.writer).workers[0])
    return frozenset(workers)


def runs_beside_others(plan: Plan, node: PlannedNode) -> bool:
    """Whether Workers of other nodes compute while this one does."""
    computing: set[str] = set()
    for each in plan.nodes:
        if each.traits.computes:
            computing.update(each.workers)
    return runs_ahead(plan) and computing != set(node.workers)


def runs_ahead(plan: Plan) -> bool:
    """Whether one node works for a Step while another does for the next, or for another part."""
    return any(source.max_lag or source.stream != "off" for source in plan.sources)
