"""Warnings about a plan, besides those about its graph (dataflow/rules/suspect_graphs.py).

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
    if not _is_predicted(plan):
        return None
    nodes_on = nodes_by_worker(plan.nodes)
    seconds = {worker: _sum_seconds(nodes) for worker, nodes in nodes_on.items()}
    can_overlap = all(source.max_lag for source in plan.sources)
    if len(seconds) == 1 or not can_overlap:
        return _sum_seconds(plan.nodes), ""
    slowest = max(seconds, key=seconds.__getitem__)
    return seconds[slowest], slowest


def _is_predicted(plan: Plan) -> bool:
    """Whether seconds are known: of every node that computes with a Model, and of some node."""
    unknown = [node for node in plan.nodes if node.estimate.seconds is None]
    models = (n for n in unknown if n.traits.computes and n.region != "evaluation")
    return len(unknown) < len(plan.nodes) and not any(models)


def _sum_seconds(nodes: Iterable[PlannedNode]) -> float:
    return sum(node.estimate.seconds or 0.0 for node in nodes)


def slow_steps(plan: Plan) -> Iterator[GraphWarning]:
    """A Step of an hour and more."""
    prediction = step_seconds(plan)
    if prediction is None or prediction[0] < _HOUR:
        return
    node = max(plan.nodes, key=lambda n: n.estimate.seconds or 0.0)
    step_hours = prediction[0] / _HOUR
    node_hours = (node.estimate.seconds or 0.0) / _HOUR
    problem = f"a Step may take about {step_hours:,.1f} hours at the greatest lengths"
    yield GraphWarning(
        rule="slow_step",
        where=node.name,
        problem=f"{problem}; {node_hours:,.1f} of them here",
        fix="a smaller model, fewer or shorter answers, or more cores",
        origin=plan.origin(node.name),
    )


WARNINGS: tuple[Callable[[Plan], Iterator[GraphWarning]], ...] = (slow_steps,)
