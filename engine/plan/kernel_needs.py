"""What the chosen kernels of a plan's nodes need, and who shares an engine by that.

Owns: the look-up. Does not own: the needs (dataflow/needs.py), the choice (passes/kernels.py), what
the plan makes of them (passes/).

An engine is what a kernel runs that has its Worker to itself: nodes that run one such kernel with
one Model in one Worker share it.
"""

from __future__ import annotations

from collections import defaultdict

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.needs import NO_NEEDS, Needs
from dataflow.operator import Operator
from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode


def kernel_name(operator: Operator, path: str) -> str:
    """Find the name by which an operator offers a kernel; empty if it does not."""
    for name, offered in operator.kernels.items():
        if offered == path:
            return name
    return ""


def needs_of(graph: Graph, node: PlannedNode) -> Needs:
    """What a node's kernel needs."""
    operator = graph.node(node.name).operator
    return operator.needs.get(kernel_name(operator, node.kernel), NO_NEEDS)


def model_of(node: PlannedNode) -> str:
    """The Model that a node computes with; empty if it has none."""
    return next((use.model for use in node.models if use.param != "tokenizer"), "")


def find_model(draft: Draft, node: PlannedNode) -> Model | None:
    """The Model itself, as the graph has it; None if it has none."""
    return draft.graph_model_by_name.get(model_of(node))


def group_engine_nodes(draft: Draft) -> list[tuple[str, ...]]:
    """Group the nodes whose kernels have a Worker to themselves by what may share one."""
    names_by_engine: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in draft.nodes:
        if needs_of(draft.graph, node).own_worker:
            names_by_engine[node.kernel, model_of(node)].append(node.name)
    return [tuple(names) for names in names_by_engine.values()]


def find_engines(draft: Draft) -> list[list[PlannedNode]]:
    """Find the nodes of each engine: those that run one kernel with one Model and, once placed,
    have a Worker in common.
    """
    engines: list[list[PlannedNode]] = []
    for names in group_engine_nodes(draft):
        same_kind: list[list[PlannedNode]] = []
        for name in names:
            _join_engine(same_kind, draft.node(name))
        engines += same_kind
    return engines


def _join_engine(engines: list[list[PlannedNode]], node: PlannedNode) -> None:
    """Add a node to those with which it has a Worker in common: these are one engine from now on,
    the last of the list.
    """
    apart: list[list[PlannedNode]] = []
    joined: list[PlannedNode] = []
    for engine in engines:
        if any(_share_worker(node, other) for other in engine):
            joined += engine
        else:
            apart.append(engine)
    engines[:] = [*apart, [*joined, node]]


def _share_worker(one: PlannedNode, other: PlannedNode) -> bool:
    return not set(one.workers).isdisjoint(other.workers)
