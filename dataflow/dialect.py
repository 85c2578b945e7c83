"""Dialects of graphs: which peer's conventions each operator and each loss follows.

Owns: filling in a graph's dialect where a node or a loss's term names none, and the list of what
has one. Does not own: what the dialects mean (convention.py, tables beside the formulas), peers'
names of our parameters (peer_parameters.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dataflow.convention import DialectUse
from dataflow.graph import Graph
from dataflow.loss import Loss, LossTerm
from dataflow.node import Node

PARAMETER = "dialect"
"""The parameter of an operator or loss that names a dialect; None is the graph's."""


def with_dialects(graph: Graph) -> Graph:
    """Write out the dialect of every node and term; the same Graph if all are.

    What names one keeps it. Operators and losses without such a parameter have no conventions.
    """
    return graph.map(lambda node: _name_dialect(node, graph.dialect))


def find_dialect_uses(graph: Graph) -> Iterator[DialectUse]:
    """Find the dialect of each node and each term that has one, in the order of the graph."""
    for node in graph.nodes:
        if (dialect := node.params.get(PARAMETER)) is not None:
            yield DialectUse(
                where=node.name,
                what=node.operator.name,
                dialect=dialect,
                params=node.params,
                conventions=tuple(node.operator.conventions.items()),
            )
        loss = node.params.get("loss")
        if not isinstance(loss, Loss):
            continue
        for term in loss.terms:
            params = dict(term.params)
            if (dialect := params.get(PARAMETER)) is not None:
                yield DialectUse(
                    where=f"{node.name}.{term.label}",
                    what=term.function.name,
                    dialect=dialect,
                    params=params,
                    conventions=term.function.conventions,
                )


def _name_dialect(node: Node, dialect: str) -> Node:
    changes = {}
    if PARAMETER in node.params and node.params[PARAMETER] is None:
        changes[PARAMETER] = dialect
    if isinstance(loss := node.params.get("loss"), Loss):
        terms = tuple(_name_term_dialect(term, dialect) for term in loss.terms)
        # The same Loss if nothing changes: then the node stays the same, too.
        if any(new is not old for new, old in zip(terms, loss.terms, strict=True)):
            changes["loss"] = Loss(terms)
    return node.changed(params=node.params | changes) if changes else node


def _name_term_dialect(term: LossTerm, dialect: str) -> LossTerm:
    if (PARAMETER, None) not in term.params:
        return term
    params = dict(term.params) | {PARAMETER: dialect}
    return replace(term, params=tuple(params.items()))
