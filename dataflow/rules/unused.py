"""Unused: what is written down and changes nothing. Warnings, not faults: the graph means one thing all the same.

Owns: lags without a trained Model, ports whose weight is 0, intakes and seeds of nothing. Does
not own: unknown parameters (refused at the call), pruning (a pass of the planner).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.loss import Loss
from dataflow.model import Model
from dataflow.node import Node
from dataflow.rules.context import Context, place
from dataflow.rules.versions import staleness


def warnings(context: Context) -> Iterator[str]:
    """One sentence each, the place first."""
    stale = staleness(context)
    for node in context.graph.nodes:
        yield from _lag(context, node)
        yield from _ports(node)
        if node.params.get("intake", "exact") != "exact" and not stale.get(node.name):
            yield f"{_at(node)}: intake={node.params['intake']!r} changes nothing: no row may lag"


def _lag(context: Context, node: Node) -> Iterator[str]:
    models = [s for p in node.operator.reads if isinstance(s := node.states.get(p), Model)]
    if not node.params.get("max_lag") or not models:
        return
    if all(m.name not in context.trained for m in models):
        yield f"{_at(node)}: max_lag changes nothing: Model {models[0].name!r} is never trained"
    elif context.regions.of[node.name] == "evaluation":
        yield f"{_at(node)}: max_lag changes nothing: an evaluation reads exactly one version"


def _ports(node: Node) -> Iterator[str]:
    loss = node.params.get("loss")
    for term in loss.terms if isinstance(loss, Loss) else ():
        params = dict(term.params)
        for port, parameter in term.function.zero:
            given = node.inputs.get(f"{term.label}.{port}")
            if given is not None and params.get(parameter) == 0:
                why = f"{term.function.name} has {parameter}={params[parameter]}"
                yield f"{_at(node)}: {given.node.name!r} is not read: {why}"


def _at(node: Node) -> str:
    return f"{node.origin} {place(node)}" if node.origin else place(node)
