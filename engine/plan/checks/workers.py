"""Workers: as many as a node has replicas and ranks, each a rank of one world, on the right hosts.

Owns: workers, worlds, hosts. Does not own: turns (devices.py), the placement (passes/place.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode


def workers(draft: Draft) -> Iterator[str]:
    """Each node is on replicas x ranks Workers, all different, with at least one thread."""
    for node in draft.nodes:
        layout, count = node.layout, node.layout.replicas * node.ranks
        if len(node.workers) != count or len(set(node.workers)) < count or not all(node.workers):
            of = f" of {node.ranks} ranks" if node.ranks > 1 else ""
            split = f"{layout.replicas} replicas{of} on {list(node.workers)}"
            yield f"{node.name}: {split}. Fix: a worker each."
        if layout.threads < 1:
            yield f"{node.name}: {layout.threads} threads. Fix: threads=1."


def worlds(draft: Draft) -> Iterator[str]:
    """A Worker is in one world: nodes of several ranks that share one have all ranks in common."""
    grouped = [n for n in draft.nodes if n.ranks > 1]
    for i, node in enumerate(grouped):
        for other in (o for o in grouped[:i] if set(node.workers) & set(o.workers)):
            yield from _world(node, other)


def _world(node: PlannedNode, other: PlannedNode) -> Iterator[str]:
    fix = f"or pin {node.name} to other workers"
    own, theirs = node.layout.tensor, other.layout.tensor
    if node.workers != other.workers:
        here, there = ",".join(node.workers), ",".join(other.workers)
        shown = f"{other.name} has ranks on {there}, {node.name} on {here}"
        yield f"{shown}: one process in two worlds. Fix: equal ranks, {fix}."
    elif own != theirs:
        shown = f"{other.name} has tensor {theirs}, {node.name} {own}, on the same workers"
        yield f"{shown}. Fix: tensor: {node.name}={theirs}, {fix}."


def hosts(draft: Draft) -> Iterator[str]:
    """Tensor ranks of one share, and Workers that take turns, are on one host; ranks on hosts of
    one kind.
    """
    groups = [(n.name, share) for n in draft.nodes if n.ranks > 1 for share in n.shares]
    for name, group in (*groups, *(("turns", group) for group in draft.turns)):
        found = dict.fromkeys(draft.host_of(w) for w in group)
        if len(found) > 1:
            together = f"{','.join(group)} are on {', '.join(found)}, and have to be on one host"
            yield f"{name}: {together}. Fix: {' '.join(f'{w}@{next(iter(found))}' for w in group)}."
    yield from _unlike(draft)


def _unlike(draft: Draft) -> Iterator[str]:
    """Ranks reduce on their GPUs, or all in host memory."""
    for node in (n for n in draft.nodes if n.ranks > 1):
        with_gpus = [w for w in node.workers if draft.devices.get(w)]
        without = [w for w in node.workers if w not in with_gpus]
        if with_gpus and without:
            here, there = ",".join(with_gpus), ",".join(without)
            problem = f"{here} have a GPU and {there} have none, and ranks have to be alike"
            first = draft.host_of(with_gpus[0])
            fix = " ".join(f"{w}@{first}" for w in without)
            yield f"{node.name}: {problem}. Fix: {fix}."
