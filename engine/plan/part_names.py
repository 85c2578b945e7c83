"""Names of users' functions that several nodes have, such as two reward nodes with an `exact` each.

Owns: which of them carry their node's name, so that no two are one metric or one column. Does not
own: a function's own name (operators/rewards.py), what is measured under it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from dataflow.graph import Graph
from dataflow.node import Node
from dataflow.regions import regions
from dataflow.rows import Domains
from dataflow.rules.context import function_at


def names_of_parts(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """Name the functions of each node, `score.exact` for one that another node has, too. Nodes
    without such a name are left out.
    """
    nodes = [node for node in graph.nodes if node.operator.part_names]
    if len(nodes) < 2:
        return {}
    own_names = {node.name: _function_names(node) for node in nodes}
    places = _find_places(graph, nodes)
    owners: Counter[tuple[object, str]] = Counter()
    for node, names in own_names.items():
        owners.update((places[node], name) for name in names)
    by_node: dict[str, tuple[str, ...]] = {}
    for node, names in own_names.items():
        shared = {name for name in names if owners[places[node], name] > 1}
        if shared:
            by_node[node] = tuple(_qualify(node, names, shared))
    return by_node


def _qualify(node: str, names: Iterable[str], shared: Collection[str]) -> Iterator[str]:
    for name in names:
        yield f"{node}.{name}" if name in shared else name


def _find_places(graph: Graph, nodes: Iterable[Node]) -> dict[str, object]:
    """Find where the names of each node meet others': those of training in the metrics of a Step.
    Evaluations report under their nodes' names, so theirs meet only as columns of the same rows.
    """
    region_of = regions(graph).of
    domains = Domains(graph)
    places: dict[str, object] = {}
    for node in nodes:
        domain = domains.of_node(node)
        if region_of[node.name] == "evaluation" and domain is not None:
            places[node.name] = id(domain.rows_before_selection)
        else:
            places[node.name] = "training"
    return places


def _function_names(node: Node) -> tuple[str, ...]:
    return function_at(node.operator.part_names)(node.params)
