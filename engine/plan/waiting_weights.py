"""Whose weights may wait in host memory between chunks.

Owns: the rules. Does not own: whose do (what was asked for, passes/memory_fit.py), bytes and
seconds of it (engine/plan/cost), how they wait (operators/kernels/torch/waiting_weights.py).

A pass without gradient changes no weight, so log-probs, values and scores by torch need theirs on
the device only while they compute. All nodes that share a module are of one kind: a trained module
that a reader shares stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.plan.base_sharing import find_shared_base, name_beginnings
from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode
from engine.plan.profiled_passes import kernel_family


def why_weights_stay(draft: Draft, node: PlannedNode) -> str:
    """Why a node's weights cannot wait, whoever shares them; empty if they can."""
    if node.work != "forward" or kernel_family(node) != "torch":
        return "only those of log-probs, values and scores by torch wait on the host"
    models = {model.name: model for model in draft.graph_models}
    for use in node.models:
        if models[use.model].rate != 1.0:
            return f"{use.model!r} moves towards another Model's weights, on its device"
    name = find_shared_base(draft.nodes, name_beginnings(models, draft.phase), node)
    return f"{name!r} has its base's weights together with other Models" if name else ""


def can_weights_wait(draft: Draft, node: PlannedNode) -> bool:
    """Whether a node's weights can wait, and no other node computes with them."""
    if why_weights_stay(draft, node):
        return False
    return not list(find_sharing_nodes(draft, node))


def find_sharing_nodes(draft: Draft, node: PlannedNode) -> Iterator[PlannedNode]:
    """Find the other nodes that compute with a node's module in one of its Workers."""
    modules = _list_modules(node)
    for other in draft.nodes:
        if other.name != node.name and not modules.isdisjoint(_list_modules(other)):
            yield other


def _list_modules(node: PlannedNode) -> set[tuple[str, str]]:
    """The modules that a node computes with, each with its Worker."""
    modules: set[tuple[str, str]] = set()
    if node.work == "evaluate":
        return modules
    for use in node.models:
        if use.param != "tokenizer":
            modules |= {(worker, use.module) for worker in node.workers}
    return modules
