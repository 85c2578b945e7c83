"""Threads of each kernel: the host's cores, shared by Workers that compute at the same time.

Owns: what computes at the same time, and the threads. Does not own: the Workers (place.py).

Nodes of one Worker take turns, and each has all its cores, which ranks inside of the Worker share;
Workers that take turns with devices count once. Only kernels that compute with a Model count:
columns and rewards take little.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
    kernels = _Kernels(draft, computing_nodes)
    for node in computing_nodes:
        counts = kernels.count_beside(node)
        for worker in node.workers:
            share = totals[worker] // counts[draft.host_of(worker)]
            shares[worker] = min(shares[worker], max(1, share))
    _level_shares(draft, shares)
    return {node.name: shares[node.workers[0]] for node in draft.nodes}


def _level_shares(draft: Draft, shares: dict[str, int]) -> None:
    """Give all Workers of a node the least share of them."""
    levelled: dict[str, int] = {}
    # A node's Workers are equal, which may bind one more Worker at a time.
    while levelled != shares:
        levelled = dict(shares)
        for node in draft.nodes:
            least = min(shares[worker] for worker in node.workers)
            shares |= dict.fromkeys(node.workers, least)


class _Kernels:
    """Which kernels can compute at the same time, on each host. Sets of nodes are numbers of which
    each node has a bit.
    """

    def __init__(self, draft: Draft, nodes: Sequence[PlannedNode]) -> None:
        """nodes: those that compute."""
        self._draft, self._nodes = draft, nodes
        self._ancestors = find_ancestors(draft.nodes)
        nodes_by_unit: dict[tuple[str, str], int] = {}
        """Host, and Worker or the first of those that take turns with it -> its nodes."""
        for bit, node in enumerate(nodes):
            for worker in node.workers:
                group = draft.turns_by_worker.get(worker, (worker,))
                unit = (draft.host_of(worker), group[0])
                nodes_by_unit[unit] = nodes_by_unit.get(unit, 0) | 1 << bit
        self._units: dict[str, Counter[int]] = defaultdict(Counter)
        """Host -> how many units have the same nodes."""
        for (host, _), unit_nodes in nodes_by_unit.items():
            self._units[host][unit_nodes] += 1

    def count_beside(self, node: PlannedNode) -> dict[str, int]:
        """How many units compute at once with a node, its own included, on each of its hosts."""
        beside = self._find_overlapping(node)
        counts: dict[str, int] = {}
        for host in dict.fromkeys(map(self._draft.host_of, node.workers)):
            alike = self._units[host].items()
            counts[host] = sum(number for nodes, number in alike if nodes & beside)
        return counts

    def _find_overlapping(self, node: PlannedNode) -> int:
        """The nodes that can compute at the same time, itself included."""
        overlapping = 0
        for bit, other in enumerate(self._nodes):
            if other is node or _can_overlap(node, other, self._ancestors):
                overlapping |= 1 << bit
        return overlapping


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
