"""What the chosen kernels of a plan's nodes need, and who shares an engine by that.

Owns: the look-up. Does not own: the needs (dataflow/needs.py), the choice (passes/kernels.py), what
the plan makes of them (passes/).

An engine is what a kernel runs that has its Worker to itself: nodes that run one such kernel with
one Model in one Worker share it.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

from dataflow.graph import Graph
from dataflow.needs import NO_NEEDS, Needs
from dataflow.operator import Operator
from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode


def kernel_name(operator: Operator, path: str) -> str:
    """By what name an operator offers a kernel."""
    return next((name for name, offered in operator.kernels.items() if offered == path), "")


def needs_of(graph: Graph, node: PlannedNode) -> Needs:
    """What a node's kernel needs."""
    operator = graph.node(node.name).operator
    return operator.needs.get(kernel_name(operator, node.kernel), NO_NEEDS)


def model_of(node: PlannedNode) -> str:
    """The Model that a node computes with; empty if it has none."""
    return next((use.model for use in node.models if use.param != "tokenizer"), "")


def alike(draft: Draft) -> list[tuple[str, ...]]:
    """Nodes whose kernels have a Worker to themselves, by what may share one."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in draft.nodes:
        if needs_of(draft.graph, node).own_worker:
            found[node.kernel, model_of(node)].append(node.name)
    return [tuple(names) for names in found.values()]


def engines(draft: Draft) -> list[list[PlannedNode]]:
    """The nodes of each engine: those that are alike and, once placed, have a Worker in common."""
    found: list[list[PlannedNode]] = []
    for names in alike(draft):
        mine: list[list[PlannedNode]] = []
        for node in map(draft.node, names):
            near = [group for group in mine if any(_meet(node, other) for other in group)]
            mine = [group for group in mine if group not in near]
            mine.append([*chain.from_iterable(near), node])
        found += mine
    return found


def _meet(one: PlannedNode, other: PlannedNode) -> bool:
    return bool(set(one.workers) & set(other.workers))
