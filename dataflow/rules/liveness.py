"""Liveness: every cycle of data and weights has a token, so that the run can begin and go on.

Owns: the graph of tokens (a marked graph: data edges have 0, a weight edge has 1 + lag) and the
search for a cycle without one. Does not own: running out of data or of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dataflow.errors import Fault
from dataflow.model import Model
from dataflow.node import Node
from dataflow.regions import leaders
from dataflow.rules.context import Context

if TYPE_CHECKING:
    from networkx import MultiDiGraph


def check(context: Context) -> Iterator[Fault]:
    """The first cycle without a token, printed."""
    if not _possible(context):
        return
    import networkx

    tokens = token_graph(context)
    empty = networkx.MultiDiGraph((u, v) for u, v, held in tokens.edges(data="tokens") if held <= 0)
    try:
        cycle = [u for u, _, _ in networkx.find_cycle(empty)]
    except networkx.NetworkXNoCycle:
        return
    first = cycle.index(min(cycle))
    yield _told(context, cycle[first:] + cycle[:first])


def _told(context: Context, cycle: list[str]) -> Fault:
    shown = " -> ".join([*cycle, cycle[0]])
    node = next((n for n in context.graph.nodes if {n.name, *_leaders(n)} & set(cycle)), None)
    leaders = all(name.startswith("Model ") for name in cycle)
    fix = "a Model that follows none at its end" if leaders else "max_lag >= 0 for every reader"
    problem = f"each waits for the one before it, and nothing can begin: {shown}"
    where = "follows" if leaders else "cycle without a token"
    origin = node.origin if node else context.graph.origin
    return Fault(rule="liveness", where=where, problem=problem, fix=fix, origin=origin)


def _possible(context: Context) -> bool:
    """Data edges are acyclic by construction, so only a follower or a lag below 0 can close a cycle
    without a token. Saves the import of networkx, which takes longer than all rules together.
    """
    lags = [lag for n in context.graph.nodes if isinstance(lag := n.params.get("max_lag"), int)]
    return min(lags, default=0) < 0 or any(m.follows is not None for m in context.models)


def token_graph(context: Context) -> MultiDiGraph:
    """Nodes by name and `Model 'policy'` for each Model; edges carry `tokens`.

    A train node fills its Model within the Step, and a follower is filled when its leader is
    published: no token. A reader may start on the Step's first version, and max_lag Steps ahead of
    it: 1 + max_lag tokens.
    """
    import networkx

    graph = networkx.MultiDiGraph()
    for node in context.graph.nodes:
        graph.add_node(node.name)
        graph.add_edges_from((p.name, node.name, {"tokens": 0}) for p in node.parents)
        for param, state in node.states.items():
            if not isinstance(state, Model):
                continue
            if param in node.operator.writes:
                graph.add_edge(node.name, _named(state), tokens=0)
            else:
                lag = node.params.get("max_lag", 0)
                graph.add_edge(
                    _named(state), node.name, tokens=1 + lag if isinstance(lag, int) else 1
                )
    for model in context.models:
        if model.follows is not None and model.copies is None:
            graph.add_edge(_named(model.follows), _named(model), tokens=0)
    return graph


def _leaders(node: Node) -> Iterator[str]:
    """The Models that a node reads or writes, with those that they follow."""
    for state in node.states.values():
        if isinstance(state, Model):
            yield from (_named(model) for model in (state, *leaders(state)))


def _named(model: Model) -> str:
    return f"Model {model.name!r}"
