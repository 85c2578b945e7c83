"""Unused: settings that change nothing. The graph is valid all the same.

Owns: lags without a trained Model and intakes where no row lags, which are warned of; ports with
weight 0, which are only noted, as an algorithm may have them for other weights. Does not own:
unknown parameters (refused at the call), pruning (a pass of the planner).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import GraphWarning
from dataflow.graph import Graph
from dataflow.loss import Loss
from dataflow.model import Buffer, Model
from dataflow.node import Node
from dataflow.rules.context import Context, place
from dataflow.rules.versions import staleness


def lags(context: Context) -> Iterator[GraphWarning]:
    """max_lag where no version can lag."""
    for node in context.graph.nodes:
        models = [s for p in node.operator.reads if isinstance(s := node.states.get(p), Model)]
        if not node.params.get("max_lag") or not models:
            continue
        if all(m.name not in context.trained for m in models):
            yield _changes_nothing(node, "max_lag", f"Model {models[0].name!r} is never trained")
        elif context.regions.of[node.name] == "evaluation":
            yield _changes_nothing(node, "max_lag", "an evaluation reads exactly one version")


def intakes(context: Context) -> Iterator[GraphWarning]:
    """A policy for rows that lag, where none lags."""
    stale = staleness(context)
    for node in context.graph.nodes:
        intake = node.params.get("intake", "exact")
        if intake != "exact" and not stale.get(node.name):
            yield _changes_nothing(node, f"intake={intake!r}", "no row may lag")


def _changes_nothing(node: Node, what: str, why: str) -> GraphWarning:
    problem = f"{what} changes nothing: {why}"
    fix = f"leave {what.partition('=')[0]}= out"
    return GraphWarning(
        rule="unused", where=place(node), problem=problem, fix=fix, origin=node.origin
    )


def notes(context: Context) -> Iterator[str]:
    """Ports that are not read, one sentence each, the place first."""
    for node in context.graph.nodes:
        yield from _ports(node)


def _ports(node: Node) -> Iterator[str]:
    for key, why in _unread(node):
        yield f"{_at(node)}: {node.inputs[key].node.name!r} is not read: {why}"


def _unread(node: Node) -> Iterator[tuple[str, str]]:
    """(input, why) of each port of a loss whose weight is the constant 0."""
    loss = node.params.get("loss")
    for term in loss.terms if isinstance(loss, Loss) else ():
        params = dict(term.params)
        for port, parameter in term.function.zero:
            key = f"{term.label}.{port}"
            if key in node.inputs and params.get(parameter) == 0:
                yield key, f"{term.function.name} has {parameter}={params[parameter]}"


def live_nodes(graph: Graph) -> set[int]:
    """Ids of the nodes that the sinks need, ports of weight 0 left out."""
    found: set[int] = set()
    stack = list(graph.sinks)
    while stack:
        node = stack.pop()
        if id(node) not in found:
            found.add(id(node))
            left_out = {key for key, _ in _unread(node)}
            stack += [p.node for key, p in node.inputs.items() if key not in left_out]
            stack += [s.writer for s in node.states.values() if isinstance(s, Buffer)]
    return found


def _at(node: Node) -> str:
    return f"{node.origin} {place(node)}" if node.origin else place(node)
