"""Liveness: every cycle of data and weights has a token, so that the run can begin and go on.

Owns: the graph of tokens (a marked graph: data edges have 0, a weight edge has 1 + lag) and the
search for a cycle without one. Does not own: running out of data or of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dataflow.errors import Fault
from dataflow.model import Model, Table
from dataflow.node import Node
from dataflow.regions import leaders
from dataflow.rules.context import Context, node_models

if TYPE_CHECKING:
    from networkx import MultiDiGraph


def check_liveness(context: Context) -> Iterator[Fault]:
    """The first cycle without a token, printed."""
    if not _may_have_cycle(context):
        return
    import networkx

    edges = token_graph(context).edges(data="tokens")
    edges_without_tokens = [(start, end) for start, end, tokens in edges if tokens <= 0]
    try:
        cycle = networkx.find_cycle(networkx.MultiDiGraph(edges_without_tokens))
    except networkx.NetworkXNoCycle:
        return
    names = [start for start, _, _ in cycle]
    # It begins with the first name, wherever the search met it.
    first = names.index(min(names))
    yield _cycle_fault(context, names[first:] + names[:first])


def _cycle_fault(context: Context, cycle: list[str]) -> Fault:
    arrows = " -> ".join([*cycle, cycle[0]])
    problem = f"each waits for the one before it, and nothing can begin: {arrows}"
    if all(name.startswith("Model ") for name in cycle):
        where, fix = "follows", "a Model that follows none at its end"
    else:
        where, fix = "cycle without a token", "max_lag >= 0 for every reader"
    origin = context.graph.origin
    for node in context.graph.nodes:
        if not {node.name, *_names_of_models(node)}.isdisjoint(cycle):
            origin = node.origin
            break
    return Fault(rule="liveness", where=where, problem=problem, fix=fix, origin=origin)


def _may_have_cycle(context: Context) -> bool:
    """Data edges are acyclic by construction, so only a follower or a lag below 0 can close a cycle
    without a token. Saves the import of networkx, which takes longer than all rules together.
    """
    if any(model.follows is not None for model in context.models):
        return True
    lags = [node.params.get("max_lag") for node in context.graph.nodes]
    return any(isinstance(lag, int) and lag < 0 for lag in lags)


def token_graph(context: Context) -> MultiDiGraph:
    """Nodes by name and `Model 'policy'` for each Model or Table; edges carry `tokens`.

    A train node fills its Model within the Step, a record node its Table, and a follower is filled
    when its leader is published: no token. A reader may start on the Step's first version, and
    max_lag Steps ahead of it: 1 + max_lag tokens.
    """
    import networkx

    graph = networkx.MultiDiGraph()
    for node in context.graph.nodes:
        graph.add_node(node.name)
        graph.add_edges_from((p.name, node.name, {"tokens": 0}) for p in node.parents)
        tokens = 1
        lag = node.params.get("max_lag", 0)
        if isinstance(lag, int):  # parameters.py reports any other
            tokens += lag
        for param, state in node.states.items():
            if not isinstance(state, Model | Table):
                continue
            if param in node.operator.writes:
                graph.add_edge(node.name, _label(state), tokens=0)
            else:
                graph.add_edge(_label(state), node.name, tokens=tokens)
    for model in context.models:
        if model.follows is not None and model.copies is None:
            graph.add_edge(_label(model.follows), _label(model), tokens=0)
    return graph


def _names_of_models(node: Node) -> Iterator[str]:
    """The Models that a node reads or writes, with those that they follow."""
    for model in node_models(node):
        yield from map(_label, (model, *leaders(model)))


def _label(state: Model | Table) -> str:
    """A State's name in the graph of tokens, where nodes have names, too."""
    return f"{type(state).__name__} {state.name!r}"
