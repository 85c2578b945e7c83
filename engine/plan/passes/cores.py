"""Threads of each kernel: the host's cores, shared among Workers that compute at the same time.

Owns: who computes beside whom, and the threads that follow. Does not own: the Workers
(place.py).

Nodes of one Worker take turns, and each has all cores of the Worker; Workers that take turns with
their devices count once. Only kernels that compute with a Model are counted: columns and rewards
(whose functions have processes of their own) take little.
"""

from __future__ import annotations

from dataclasses import replace

from engine.plan.draft import Draft
from engine.plan.passes.place import above
from engine.plan.plan import PlannedNode


def cores(draft: Draft) -> Draft:
    """Set every node's threads: those that were asked for, else the Worker's share of the cores."""
    threads = draft.threads
    shares = {} if threads else _shares(draft)
    nodes = (
        replace(n, layout=replace(n.layout, threads=threads or shares[n.name])) for n in draft.nodes
    )
    totals = _totals(draft)
    parts = [
        n
        for n in draft.nodes
        if n.traits.computes and shares and shares[n.name] < totals[n.workers[0]]
    ]
    said = (
        f"a part of the {draft.cluster.cores} cores"
        if not draft.hosts
        else "a part of their host's cores"
    )
    note = (
        f"{', '.join(n.name for n in parts)}: {said}, as others compute beside; equal threads give"
        " equal bits"
    )
    return replace(draft, nodes=tuple(nodes), notes=(*draft.notes, *([note] if parts else [])))


def _totals(draft: Draft) -> dict[str, int]:
    """The cores of each Worker's host."""
    return {
        w: draft.cluster.on(draft.hosts.get(w, "")).cores for n in draft.nodes for w in n.workers
    }


def _shares(draft: Draft) -> dict[str, int]:
    """Node -> threads; those of one Worker are equal, and those of all Workers of one node."""
    busy = [n for n in draft.nodes if n.traits.computes]
    computing = {w for n in busy for w in n.workers}
    totals = _totals(draft)
    shares = {w: cores if w in computing or not computing else 1 for w, cores in totals.items()}
    turn = {w: number for number, group in enumerate(draft.turns) for w in group}
    for node, beside in _beside(draft, busy).items():
        for worker in node_workers(busy, node):
            here = {turn.get(w, w) for w in beside if draft.hosts.get(w) == draft.hosts.get(worker)}
            shares[worker] = min(shares[worker], max(1, totals[worker] // len(here)))
    for _ in draft.nodes:  # a node's Workers are equal, which may bind one more Worker at a time
        for node in draft.nodes:
            shares |= dict.fromkeys(node.workers, min(shares[w] for w in node.workers))
    return {n.name: shares[n.workers[0]] for n in draft.nodes}


def node_workers(nodes: list[PlannedNode], name: str) -> tuple[str, ...]:
    """The Workers of the node of that name."""
    return next(n.workers for n in nodes if n.name == name)


def _beside(draft: Draft, busy: list[PlannedNode]) -> dict[str, set[str]]:
    """For each node, the Workers that can compute while it does, its own among them."""
    uppers = above(draft.nodes)
    return {
        node.name: {w for o in busy if node is o or _overlap(node, o, uppers) for w in o.workers}
        for node in busy
    }


def _overlap(one: PlannedNode, other: PlannedNode, uppers: dict[str, frozenset[str]]) -> bool:
    """Whether both can run at once, were they in Workers of their own.

    A stream with a lag goes on beside everything. Without it a wave's nodes wait for whole chunks
    of those above them, regions take turns, and train nodes run alone.
    """
    if one.lag or other.lag:
        return True
    if one.region != other.region or "train" in (one.work, other.work):
        return False
    return one.name not in uppers[other.name] and other.name not in uppers[one.name]
