"""Threads of each kernel: the host's cores, shared by Workers that compute at the same time.

Owns: what computes at the same time, and the threads. Does not own: the Workers (place.py).

Nodes of one Worker take turns, and each has all its cores, which ranks inside of the Worker share;
Workers that take turns with devices count once. Only kernels that compute with a Model count:
columns and rewards take little.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from engine.plan.draft import Draft
from engine.plan.passes.place import find_ancestors
from engine.plan.plan import PlannedNode
from engine.plan.worker_index import workers_by_host


def share_cores(draft: Draft) -> Draft:
    """Set every node's threads: as asked for, else the Worker's share of the cores."""
    notes: tuple[str, ...] = ()
    if draft.threads:
        threads = dict.fromkeys((node.name for node in draft.nodes), draft.threads)
    else:
        shares = _share_cores_by_node(draft)
        notes = tuple(_describe_shares(draft, shares))
        threads = {n.name: max(1, shares[n.name] // n.layout.inner) for n in draft.nodes}
    nodes: list[PlannedNode] = []
    for node in draft.nodes:
        layout = replace(node.layout, threads=threads[node.name])
        nodes.append(replace(node, layout=layout))
    return replace(draft, nodes=tuple(nodes), notes=(*draft.notes, *notes))


def _describe_shares(draft: Draft, shares: Mapping[str, int]) -> Iterator[str]:
    totals = _cores_by_worker(draft)
    divided_nodes: list[str] = []
    for node in _computing_nodes(draft):
        most = min(totals[worker] for worker in node.workers)
        if shares[node.name] < most:
            divided_nodes.append(node.name)
    if not divided_nodes:
        return
    cores = f"the {draft.cluster.cores} cores"
    if draft.hosts:
        cores = "their host's cores"
    why = "as others compute meanwhile; equal threads give equal bits"
    yield f"{', '.join(divided_nodes)}: a part of {cores}, {why}"


def _computing_nodes(draft: Draft) -> list[PlannedNode]:
    return [node for node in draft.nodes if node.traits.computes]


def _cores_by_worker(draft: Draft) -> dict[str, int]:
    """All cores of each Worker's host."""
    hosts = workers_by_host(draft, draft.workers)
    cores = {host: draft.cluster.on(host).cores for host in hosts}
    return {worker: cores[draft.host_of(worker)] for worker in draft.workers}


def _share_cores_by_node(draft: Draft) -> dict[str, int]:
    """Node -> threads; those of one Worker are equal, and those of all Workers of one node."""
    totals = _cores_by_worker(draft)
    shares = dict(totals)
    computing_nodes = _computing_nodes(draft)
    computing_workers: set[str] = set()
    for node in computing_nodes:
        computing_workers.update(node.workers)
    if computing_workers:
        # Workers of columns and rewards have one thread, unless nothing else computes at all.
        idle_workers = shares.keys() - computing_workers
        shares |= dict.fromkeys(idle_workers, 1)
    for node, concurrent in _find_concurrent(computing_nodes, find_ancestors(draft.nodes)):
        counts = _count_at_once(draft, concurrent)
        for worker in node.workers:
            share = totals[worker] // counts[draft.host_of(worker)]
            shares[worker] = min(shares[worker], max(1, share))
    _level_shares(draft, shares)
    return {node.name: shares[node.workers[0]] for node in draft.nodes}


def _level_shares(draft: Draft, shares: dict[str, int]) -> None:
    """Give all Workers of a node the least share of them."""
    for _ in draft.nodes:  # a node's Workers are equal, which may bind one more Worker at a time
        for node in draft.nodes:
            least = min(shares[worker] for worker in node.workers)
            shares |= dict.fromkeys(node.workers, least)


def _find_concurrent(
    computing_nodes: Sequence[PlannedNode], ancestors: Mapping[str, frozenset[str]]
) -> Iterator[tuple[PlannedNode, set[str]]]:
    """Each node, and the Workers that can compute at the same time, its own included."""
    for node in computing_nodes:
        workers = set(node.workers)
        for other in computing_nodes:
            if other is not node and _can_overlap(node, other, ancestors):
                workers.update(other.workers)
        yield node, workers


def _count_at_once(draft: Draft, concurrent: Iterable[str]) -> dict[str, int]:
    """How many of these Workers compute at once on each host; a group that takes turns is one."""
    turns = draft.turns_by_worker
    counts: dict[str, int] = {}
    for host, workers in workers_by_host(draft, concurrent).items():
        units = {turns.get(worker, worker) for worker in workers}
        counts[host] = len(units)
    return counts


def _can_overlap(
    one: PlannedNode, other: PlannedNode, ancestors: Mapping[str, frozenset[str]]
) -> bool:
    """Whether both could run at once in Workers of their own."""
    if one.lag or other.lag:
        return True
    # Without a lag nodes wait for whole chunks, regions take turns, and train nodes run alone.
    if one.region != other.region or "train" in (one.work, other.work):
        return False
    return one.name not in ancestors[other.name] and other.name not in ancestors[one.name]
