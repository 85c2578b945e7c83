"""Look-ups by Worker of a whole plan, each in one pass: asked for one by one they are quadratic.

Owns: the look-ups. Does not own: what they are asked for (passes/, checks/).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from engine.plan.cost.memory import FETCHED_PART, VERSION_PARTS
from engine.plan.plan import Decisions, PlannedNode

Group = tuple[str, ...]
"""Workers that take turns with devices."""

_MAPPED_VERSIONS = 2
"""Of a Model on a host: one that some readers still load, and the next."""


def nodes_by_worker(nodes: Iterable[PlannedNode]) -> dict[str, list[PlannedNode]]:
    """The nodes that each Worker runs, or has a rank of, in running order, with its own bytes."""
    nodes_on: dict[str, list[PlannedNode]] = {}
    for node in nodes:
        for worker in dict.fromkeys(node.workers):
            nodes_on.setdefault(worker, []).append(_with_own_bytes(node, worker))
    return nodes_on


def _with_own_bytes(node: PlannedNode, worker: str) -> PlannedNode:
    """The node with the bytes that it has in this Worker: of ranks that have a part of the weights
    each, the first alone keeps versions for readers.
    """
    if not node.layout.partial or worker == node.workers[0]:
        return node
    return replace(node, estimate=node.estimate.without(VERSION_PARTS))


def share_versions(
    decided: Decisions, nodes_on: Mapping[str, Sequence[PlannedNode]]
) -> dict[str, list[PlannedNode]]:
    """The nodes of one host's Workers, by Worker, with what each adds to the host: Workers map a
    version that one of them has fetched, or that its writer keeps there
    (engine/coordinator/weight_tree.py).
    """
    writers = {model.name: model.writer for model in decided.models if model.writer}
    keepers = {node.name: node.workers[:1] for node in decided.nodes}
    counts: Counter[str] = Counter()
    shared: dict[str, list[PlannedNode]] = {}
    for worker, nodes in nodes_on.items():
        shared[worker] = []
        for node in nodes:
            model = next((use.model for use in node.models if use.trained), "")
            counts[model] += FETCHED_PART in node.estimate.bytes
            is_there = not nodes_on.keys().isdisjoint(keepers.get(writers.get(model, ""), ()))
            if is_there or counts[model] > _MAPPED_VERSIONS:
                node = replace(node, estimate=node.estimate.without((FETCHED_PART,)))
            shared[worker].append(node)
    return shared


def workers_by_host(plan: Decisions, workers: Iterable[str]) -> dict[str, list[str]]:
    """These Workers by their host, in their order; under the empty name if all are on this one."""
    by_host: dict[str, list[str]] = {}
    for worker in workers:
        by_host.setdefault(plan.host_of(worker), []).append(worker)
    return by_host
