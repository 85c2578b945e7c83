"""Look-ups by Worker of a whole plan, each in one pass: asked for one by one they are quadratic.

Owns: the look-ups. Does not own: what they are asked for (passes/, checks/).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from engine.plan.cost.memory import VERSION_PARTS
from engine.plan.plan import Decisions, PlannedNode

Group = tuple[str, ...]
"""Workers that take turns with devices."""


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


def turns_by_worker(turns: Sequence[Group]) -> dict[str, Group]:
    """The group of each Worker that takes turns: the first, where it is in several."""
    groups: dict[str, Group] = {}
    for group in reversed(turns):  # so that the first one counts
        groups |= dict.fromkeys(group, group)
    return groups


def workers_by_host(plan: Decisions, workers: Iterable[str]) -> dict[str, list[str]]:
    """These Workers by their host, in their order; under the empty name if all are on this one."""
    by_host: dict[str, list[str]] = {}
    for worker in workers:
        by_host.setdefault(plan.host_of(worker), []).append(worker)
    return by_host
