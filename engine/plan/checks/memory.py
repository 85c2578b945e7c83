"""Memory: the peaks of Workers fit, on each GPU and in the memory of each host.

Owns: the comparison, and the message. Does not own: any number (passes/estimate.py,
engine/plan/cost).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.plan.cluster import Cluster, Host
from engine.plan.cost.memory import HOST_PARTS, host_peak, lasting, peak
from engine.plan.draft import Draft
from engine.plan.plan import Decisions, PlannedNode
from engine.plan.worker_index import Group, nodes_by_worker, turns_by_worker, workers_by_host
from engine.plan.worker_peaks import shared_process_bytes

Nodes = Mapping[str, list[PlannedNode]]
"""Of each Worker."""
Turns = Sequence[Sequence[str]]
Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """A GPU, or a host without one: its Workers, its bytes, those that they need together at most.
    without: parts that lie elsewhere.
    """

    workers: Nodes
    where: str
    bytes: int
    need: int
    without: Parts = ()


def memory(draft: Draft) -> Iterator[str]:
    """The peaks of each Worker and of each host fit, on GPUs and in host memory."""
    for here in _hosts(draft, draft.cluster):
        for room in _rooms(draft, here):
            yield from _fits(room, draft.cluster.hosts)
        if here.cluster.gpus:
            yield from _beside_gpus(here.nodes, _groups(here.by_turns, here.nodes), here.cluster)


def rooms(decided: Decisions, cluster: Cluster) -> Iterator[MemoryRoom]:
    """Of every GPU, and of hosts without one, that some Worker is on."""
    for here in _hosts(decided, cluster):
        yield from _rooms(decided, here)


class _Here(NamedTuple):
    """A host, as its Workers have it."""

    nodes: Nodes
    by_turns: Mapping[str, Group]
    cluster: Cluster
    where: str


def _hosts(decided: Decisions, cluster: Cluster) -> Iterator[_Here]:
    by_worker, by_turns = nodes_by_worker(decided.nodes), turns_by_worker(decided.turns)
    for host, here in workers_by_host(decided, decided.workers).items():
        nodes = {w: by_worker[w] for w in here}
        yield _Here(nodes, by_turns, cluster.on(host), f"host {host}" if host else "this host")


def _rooms(decided: Decisions, here: _Here) -> Iterator[MemoryRoom]:
    if here.cluster.gpus:
        yield from _gpus(decided, here)
    else:
        need = host_peak(_parts(here.nodes), _groups(here.by_turns, here.nodes))
        need += shared_process_bytes(decided, here.nodes)
        yield MemoryRoom(here.nodes, here.where, here.cluster.memory, need)


def _parts(nodes: Nodes) -> dict[str, list[Mapping[str, int]]]:
    return {w: [n.estimate.bytes for n in those] for w, those in nodes.items()}


def _groups(by_turns: Mapping[str, Group], workers: Iterable[str]) -> list[list[str]]:
    """Those of these Workers that take turns with one another. by_turns: the group of each."""
    found: dict[Group, list[str]] = {}
    for worker in workers:
        if worker in by_turns:
            found.setdefault(by_turns[worker], []).append(worker)
    return list(found.values())


def _gpus(decided: Decisions, host: _Here) -> Iterator[MemoryRoom]:
    """Workers by their GPU; those without one count with the first."""
    nodes, gpus = host.nodes, host.cluster.gpus
    having = {w: decided.devices.get(w, (0,)) for w in nodes}
    on: dict[int, list[str]] = {}
    for worker, numbers in having.items():
        for index in numbers:
            on.setdefault(index, []).append(worker)
    for index, workers in on.items():
        here = {w: _on_each(nodes[w], len(having[w])) for w in workers}
        mine = _groups(host.by_turns, here)
        need = host_peak(_parts(here), mine, without=HOST_PARTS, gives_back=True)
        gpu = "the GPU" if len(gpus) == 1 else f"GPU {index}"
        gpu += "" if host.where == "this host" else f" of {host.where}"
        yield MemoryRoom(here, gpu, gpus[index], need, HOST_PARTS)


def _on_each(nodes: list[PlannedNode], devices: int) -> list[PlannedNode]:
    return [replace(n, estimate=n.estimate.on_each(devices)) for n in nodes]


def _beside_gpus(nodes: Nodes, turns: Turns, cluster: Cluster) -> Iterator[str]:
    """Rows that wait, and what sleep moves to the host."""
    parts = _parts(nodes)
    held = sum(p.get(name, 0) for those in parts.values() for p in those for name in HOST_PARTS)
    held += sum(lasting(p, without=HOST_PARTS) for group in turns for w in group for p in parts[w])
    if held > cluster.memory:
        problem = f"rows of {_gib(held)} wait in {_gib(cluster.memory)}"
        yield f"{', '.join(nodes)}: {problem}. Fix: a lower batch or max_lag."


def _fits(at: MemoryRoom, hosts: Iterable[Host]) -> Iterator[str]:
    """A Worker alone, else all together, if they need more than there is. hosts: of the cluster,
    one of which may have more.
    """
    if at.need <= at.bytes:
        return
    workers, room, need, without = at.workers, at.bytes, at.need, at.without
    alone = {w: peak(parts, without=without) for w, parts in _parts(workers).items()}
    single = next((w for w, size in alone.items() if size > room or len(workers) == 1), "")
    if single:
        told = f"{single} needs {_gib(alone[single])}"
    else:
        told = f"{', '.join(workers)} together need {_gib(need)}"
    largest = _largest([workers[single]] if single else workers.values(), without)
    shown = ", ".join(f"{part} of {name} {_gib(size)}" for size, part, name in largest)
    fix = _smaller(largest[0][1]) + ("" if single else ", or fewer workers")
    if single and (larger := _large_enough(hosts, alone[single])):
        fix += f", or a pin to a larger host ({single}@{larger})"
    yield f"{told}, {at.where} has {_gib(room)}: {shown}. Fix: {fix}."


def _large_enough(hosts: Iterable[Host], need: int) -> str:
    """The first host with so much memory, on each GPU if it has any; empty if there is none."""
    known = (host for host in hosts if not host.refused)
    return next((h.name for h in known if min(h.gpus, default=h.memory) >= need), "")


def _largest(workers: Iterable[list[PlannedNode]], without: Parts) -> list[tuple[int, str, str]]:
    """(bytes, part, node) of the four largest parts."""
    nodes = (n for those in workers for n in those)
    parts = {(size, part, n.name) for n in nodes for part, size in n.estimate.bytes.items()}
    return sorted((p for p in parts if p[1] not in without), reverse=True)[:4]


def _smaller(part: str) -> str:
    """The nearest way to less of a part."""
    if part in ("snapshot", "copies"):
        return "readers in the writer's worker (workers: one)"
    if part == "engine":
        return "another kernel (kernel)"
    if part in ("kv_cache", "cache", "outbox", "device_columns"):
        return "a lower batch, n, max_tokens or max_prompt_tokens"
    if part in ("activations", "logits"):
        return "shorter rows: a lower max_tokens or max_prompt_tokens"
    return 'a smaller base, or dtype="bfloat16" for Models that are not trained'


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
