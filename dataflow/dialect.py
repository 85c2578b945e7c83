"""Dialects of graphs: which peer's conventions each operator and each loss follows.

Owns: filling in a graph's dialect where a node or a loss's term names none, and the list of what
has one. Does not own: what the dialects mean (convention.py, tables beside the formulas).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dataflow.convention import Spoken
from dataflow.graph import Graph
from dataflow.loss import Loss, LossTerm
from dataflow.node import Node

PARAMETER = "dialect"
"""The parameter of an operator or loss that names a dialect; None is the graph's."""


def with_dialects(graph: Graph) -> Graph:
    """The graph with the dialect of every node and term written out; the same if all are.

    What names one keeps it. Operators and losses without such a parameter have no conventions.
    """
    return graph.map(lambda node: _named(node, graph.dialect))


def spoken(graph: Graph) -> Iterator[Spoken]:
    """The dialect of each node and each term that has one, in the order of the graph."""
    for node in graph.nodes:
        if (dialect := node.params.get(PARAMETER)) is not None:
            yield Spoken(
                where=node.name,
                what=node.operator.name,
                dialect=dialect,
                params=node.params,
                conventions=tuple(node.operator.conventions.items()),
            )
        loss = node.params.get("loss")
        for term in loss.terms if isinstance(loss, Loss) else ():
            params = dict(term.params)
            if (dialect := params.get(PARAMETER)) is not None:
                yield Spoken(
                    where=f"{node.name}.{term.label}",
                    what=term.function.name,
                    dialect=dialect,
                    params=params,
                    conventions=term.function.conventions,
                )


def _named(node: Node, dialect: str) -> Node:
    changed = {}
    if PARAMETER in node.params and node.params[PARAMETER] is None:
        changed[PARAMETER] = dialect
    if isinstance(loss := node.params.get("loss"), Loss):
        terms = tuple(_term(term, dialect) for term in loss.terms)
        if any(new is not old for new, old in zip(terms, loss.terms, strict=True)):
            changed["loss"] = Loss(terms)
    return node.changed(params=node.params | changed) if changed else node


def _term(term: LossTerm, dialect: str) -> LossTerm:
    if (PARAMETER, None) not in term.params:
        return term
    params = tuple((k, dialect if k == PARAMETER else value) for k, value in term.params)
    return replace(term, params=params)
