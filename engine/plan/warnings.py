"""Warnings about a plan, besides those about its graph (dataflow/rules/doubtful.py).

Owns: the list, and the predicted time of a Step. A new warning is a function from a Plan to
warnings, and its line in WARNINGS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from dataflow.errors import GraphWarning
from engine.plan.plan import Plan, PlannedNode
from engine.plan.worker_index import nodes_by_worker

_HOUR = 3600.0


def step_seconds(plan: Plan) -> tuple[float, str] | None:
    """Predicted seconds a Step, and the slowest Worker if all overlap, else ""; None if unknown."""
    if not _predicted(plan):
        return None
    by = {w: _seconds(nodes) for w, nodes in nodes_by_worker(plan.nodes).items()}
    slowest = max(by, key=by.__getitem__)
    overlap = len(by) > 1 and all(s.max_lag for s in plan.sources)
    return (by[slowest], slowest) if overlap else (_seconds(plan.nodes), "")


def _predicted(plan: Plan) -> bool:
    unknown = [n for n in plan.nodes if n.estimate.seconds is None]
    models = (n for n in unknown if n.traits.computes and n.region != "evaluation")
    return len(unknown) < len(plan.nodes) and not any(models)


def _seconds(nodes: Iterable[PlannedNode]) -> float:
    return sum(n.estimate.seconds or 0.0 for n in nodes)


def slow_steps(plan: Plan) -> Iterator[GraphWarning]:
    """A Step of an hour and more."""
    found = step_seconds(plan)
    if found is None or found[0] < _HOUR:
        return
    node = max(plan.nodes, key=lambda n: n.estimate.seconds or 0.0)
    whole, here = found[0] / _HOUR, (node.estimate.seconds or 0.0) / _HOUR
    problem = f"a Step may take about {whole:,.1f} hours at the greatest lengths; "
    yield GraphWarning(
        rule="slow_step",
        where=node.name,
        problem=f"{problem}{here:,.1f} of them here",
        fix="a smaller model, fewer or shorter answers, or more cores",
        origin=plan.origin(node.name),
    )


WARNINGS: tuple[Callable[[Plan], Iterator[GraphWarning]], ...] = (slow_steps,)
