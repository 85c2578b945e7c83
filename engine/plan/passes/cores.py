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
from engine.plan.passes.place import above
from engine.plan.plan import PlannedNode
from engine.plan.worker_index import turns_by_worker, workers_by_host


def cores(draft: Draft) -> Draft:
    """Set every node's threads: as asked for, else the Worker's share of the cores."""
    if draft.threads:
        shares, notes = dict.fromkeys((n.name for n in draft.nodes), draft.threads), ()
    else:
        shares = _shares(draft)
        notes = tuple(_notes(draft, shares))
        shares = {n.name: max(1, shares[n.name] // n.layout.inner) for n in draft.nodes}
    nodes = tuple(replace(n, layout=replace(n.layout, threads=shares[n.name])) for n in draft.nodes)
    return replace(draft, nodes=nodes, notes=(*draft.notes, *notes))


def _notes(draft: Draft, shares: Mapping[str, int]) -> Iterator[str]:
    totals, busy = _totals(draft), (n for n in draft.nodes if n.traits.computes)
    parts = ", ".join(n.name for n in busy if shares[n.name] < min(totals[w] for w in n.workers))
    cores = "their host's cores" if draft.hosts else f"the {draft.cluster.cores} cores"
    if parts:
        why = "as others compute meanwhile; equal threads give equal bits"
        yield f"{parts}: a part of {cores}, {why}"


def _totals(draft: Draft) -> dict[str, int]:
    """The cores of each Worker's host."""
    hosts = workers_by_host(draft, draft.workers)
    cores = {host: draft.cluster.on(host).cores for host in hosts}
    return {w: cores[draft.host_of(w)] for w in draft.workers}


def _shares(draft: Draft) -> dict[str, int]:
    """Node -> threads; those of one Worker are equal, and those of all Workers of one node."""
    totals, busy = _totals(draft), [n for n in draft.nodes if n.traits.computes]
    computing = {w for n in busy for w in n.workers}
    shares = {w: cores if w in computing or not computing else 1 for w, cores in totals.items()}
    for node, beside in _beside(busy, above(draft.nodes)):
        counts = _at_once(draft, beside)
        for worker in node.workers:
            count = counts[draft.host_of(worker)]
            shares[worker] = min(shares[worker], max(1, totals[worker] // count))
    _level(draft, shares)
    return {n.name: shares[n.workers[0]] for n in draft.nodes}


def _level(draft: Draft, shares: dict[str, int]) -> None:
    """Give all Workers of a node the least share of them."""
    for _ in draft.nodes:  # a node's Workers are equal, which may bind one more Worker at a time
        for node in draft.nodes:
            shares |= dict.fromkeys(node.workers, min(shares[w] for w in node.workers))


def _beside(
    busy: Sequence[PlannedNode], uppers: dict[str, frozenset[str]]
) -> Iterator[tuple[PlannedNode, set[str]]]:
    """Each node, and the Workers that can compute at the same time, its own included."""
    for node in busy:
        others = (o for o in busy if node is o or _overlap(node, o, uppers))
        yield node, {w for o in others for w in o.workers}


def _at_once(draft: Draft, beside: Iterable[str]) -> dict[str, int]:
    """How many of these Workers compute at once on each host; a group that takes turns is one."""
    turns, hosts = turns_by_worker(draft.turns), workers_by_host(draft, beside)
    return {host: len({turns.get(w, w) for w in here}) for host, here in hosts.items()}


def _overlap(one: PlannedNode, other: PlannedNode, uppers: dict[str, frozenset[str]]) -> bool:
    """Whether both could run at once in Workers of their own."""
    if one.lag or other.lag:
        return True
    # Without a lag nodes wait for whole chunks, regions take turns, and train nodes run alone.
    if one.region != other.region or "train" in (one.work, other.work):
        return False
    return one.name not in uppers[other.name] and other.name not in uppers[one.name]
