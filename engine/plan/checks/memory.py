"""Memory: the peaks of Workers fit, on each GPU and in the memory of each host.

Owns: the comparison, and the message. Does not own: any number (passes/estimate.py,
engine/plan/cost).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from engine.plan.cluster import Cluster, Host
from engine.plan.cost.memory import HOST_PARTS, SHARED_PARTS, host_peak, lasting, peak
from engine.plan.cost.training_memory import OFFLOADED_PART
from engine.plan.draft import Draft
from engine.plan.plan import Decisions, PlannedNode
from engine.plan.refusals import add_fix
from engine.plan.waiting_weights import can_weights_wait
from engine.plan.worker_index import (
    Group,
    nodes_by_worker,
    share_versions,
    workers_by_host,
)
from engine.plan.worker_peaks import shared_process_bytes

Nodes = dict[str, list[PlannedNode]]
"""Worker -> its nodes."""
Parts = tuple[str, ...]
_VERSION_PARTS: Parts = ("snapshot", "copies")


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """A GPU, or a host without one, and the Workers on it."""

    workers: Nodes
    where: str
    """In messages."""
    bytes: int
    need: int
    """The most bytes that the Workers need together."""
    without: Parts = ()
    """Parts that lie elsewhere."""

    @property
    def is_full(self) -> bool:
        """Whether the Workers need more than there is."""
        return self.need > self.bytes

    @property
    def node_names(self) -> set[str]:
        """The nodes of all Workers."""
        return {node.name for node in self.nodes}

    @property
    def nodes(self) -> list[PlannedNode]:
        """Those of all Workers; twice what two of them have."""
        return list(chain.from_iterable(self.workers.values()))


def check_memory(draft: Draft, hosts: Container[str] | None = None) -> Iterator[str]:
    """The peaks of each Worker and of each host fit, on GPUs and in host memory. hosts: those that
    are looked at; None for all.
    """
    for host in _list_hosts(draft, draft.cluster, hosts):
        for room in _find_rooms_of(draft, host):
            yield from _check_fit(room, draft)
        if host.cluster.gpus:
            yield from _check_host_memory(host)


def find_memory_rooms(
    decided: Decisions, cluster: Cluster, hosts: Container[str] | None = None
) -> Iterator[MemoryRoom]:
    """Find every GPU, and every host without one, that some Worker is on. hosts: those that are
    looked at; None for all.
    """
    for host in _list_hosts(decided, cluster, hosts):
        yield from _find_rooms_of(decided, host)


class _UsedHost(NamedTuple):
    """A host, as its Workers have it."""

    nodes: Nodes
    turns: Mapping[str, Group]
    """The group of each Worker that takes turns."""
    cluster: Cluster
    name: str
    """In messages."""


def _list_hosts(
    decided: Decisions, cluster: Cluster, hosts: Container[str] | None = None
) -> Iterator[_UsedHost]:
    """hosts: those that are looked at; None for all."""
    nodes_on, turns = nodes_by_worker(decided.nodes), decided.turns_by_worker
    for host, workers in workers_by_host(decided, decided.workers).items():
        if hosts is not None and host not in hosts:
            continue
        nodes: dict[str, list[PlannedNode]] = {}
        for worker in workers:
            nodes[worker] = [_as_on_worker(node, worker) for node in nodes_on[worker]]
        nodes = share_versions(decided, nodes)
        name = f"host {host}" if host else "this host"
        yield _UsedHost(nodes=nodes, turns=turns, cluster=cluster.on(host), name=name)


def _as_on_worker(node: PlannedNode, worker: str) -> PlannedNode:
    """The node as one of its Workers has it: of ranks with a part of the weights the first alone
    keeps whole versions.
    """
    if not node.layout.partial or worker == node.workers[0]:
        return node
    bytes_by_part = node.estimate.bytes
    kept_parts = {part: bytes_by_part[part] for part in bytes_by_part if part not in _VERSION_PARTS}
    return replace(node, estimate=replace(node.estimate, bytes=kept_parts))


def _find_rooms_of(decided: Decisions, host: _UsedHost) -> Iterator[MemoryRoom]:
    if host.cluster.gpus:
        yield from _find_gpus(decided, host)
    else:
        need = host_peak(_part_bytes(host.nodes), _group_by_turns(host.turns, host.nodes))
        need += shared_process_bytes(decided, host.nodes)
        yield MemoryRoom(host.nodes, host.name, host.cluster.memory, need)


def _part_bytes(nodes_on: Nodes) -> dict[str, list[Mapping[str, int]]]:
    parts: dict[str, list[Mapping[str, int]]] = {}
    for worker, nodes in nodes_on.items():
        parts[worker] = [node.estimate.bytes for node in nodes]
    return parts


def _group_by_turns(turns: Mapping[str, Group], workers: Iterable[str]) -> list[list[str]]:
    """Group those of the Workers that take turns with one another. turns: the group of each."""
    members: dict[Group, list[str]] = {}
    for worker in workers:
        if worker in turns:
            members.setdefault(turns[worker], []).append(worker)
    return list(members.values())


def _find_gpus(decided: Decisions, host: _UsedHost) -> Iterator[MemoryRoom]:
    """Workers by their GPU; those without one count with the first."""
    gpus = host.cluster.gpus
    workers_by_gpu: dict[int, list[str]] = {}
    divided_nodes: Nodes = {}
    for worker, nodes in host.nodes.items():
        numbers = decided.devices.get(worker, (0,))
        divided_nodes[worker] = _divide_nodes(nodes, len(numbers))
        for index in numbers:
            workers_by_gpu.setdefault(index, []).append(worker)
    for index, workers in workers_by_gpu.items():
        nodes_on = {worker: divided_nodes[worker] for worker in workers}
        need = host_peak(
            _part_bytes(nodes_on),
            _group_by_turns(host.turns, workers),
            without=HOST_PARTS,
            gives_back=True,
        )
        name = "the GPU" if len(gpus) == 1 else f"GPU {index}"
        if host.name != "this host":
            name += f" of {host.name}"
        yield MemoryRoom(nodes_on, name, gpus[index], need, HOST_PARTS)


def _divide_nodes(nodes: list[PlannedNode], devices: int) -> list[PlannedNode]:
    """The nodes as each of so many devices has them."""
    if devices == 1:
        return nodes
    return [replace(node, estimate=node.estimate.on_each(devices)) for node in nodes]


def _check_host_memory(host: _UsedHost) -> Iterator[str]:
    """Rows that wait beside GPUs, and what sleep moves to the host."""
    parts_by_worker = _part_bytes(host.nodes)
    size = state_size = 0
    for node_parts in chain.from_iterable(parts_by_worker.values()):
        size += sum(node_parts.get(name, 0) for name in HOST_PARTS)
        state_size += node_parts.get(OFFLOADED_PART, 0)
    for worker in chain.from_iterable(_group_by_turns(host.turns, host.nodes)):
        stays = (*HOST_PARTS, *SHARED_PARTS)
        size += sum(lasting(parts, without=stays) for parts in parts_by_worker[worker])
    if size > host.cluster.memory:
        what, fix = "rows", "a lower batch or max_lag"
        if state_size > size // 2:
            what, fix = "rows and offloaded state", "offload none, or a smaller base"
        problem = f"{what} of {_gib(size)} wait in {_gib(host.cluster.memory)}"
        yield add_fix(f"{', '.join(host.nodes)}: {problem}", fix)


def _check_fit(room: MemoryRoom, draft: Draft) -> Iterator[str]:
    """A Worker alone, else all together, if they need more than there is. One of the cluster's
    hosts may have more.
    """
    if not room.is_full:
        return
    peaks: dict[str, int] = {}
    for worker, parts in _part_bytes(room.workers).items():
        peaks[worker] = peak(parts, without=room.without)
    too_large = [worker for worker, size in peaks.items() if size > room.bytes]
    if len(peaks) == 1:
        too_large = list(peaks)  # beside its process, which counts in the need
    single = too_large[0] if too_large else ""
    if single:
        need = f"{single} needs {_gib(peaks[single])}"
        largest = _find_largest(room.workers[single], room.without)
        fix = _suggest_smaller(largest[0].part)
        larger_host = _find_large_enough(draft.cluster.hosts, peaks[single])
        if larger_host:
            fix += f", or a pin to a larger host ({single}@{larger_host})"
    else:
        need = f"{', '.join(room.workers)} together need {_gib(room.need)}"
        largest = _find_largest(chain.from_iterable(room.workers.values()), room.without)
        fix = f"{_suggest_smaller(largest[0].part)}, or fewer workers"
    shown = ", ".join(map(str, largest))
    size = f"{room.where} has {_gib(room.bytes)}"
    declined = list(_list_declined(room, draft))
    if not declined and any(map(_is_training, room.nodes)):
        shown += "; recompute and offload do not make it fit"
    fixes = ", or ".join([*declined, fix])
    yield add_fix(f"{need}, {size}: {shown}", fixes)


def _is_training(node: PlannedNode) -> bool:
    return node.work == "train"


def _list_declined(room: MemoryRoom, draft: Draft) -> Iterator[str]:
    """The flags that would spare memory, and were given as none: all others the plan has tried
    (passes/memory_fit.py).
    """
    for node in {node.name: node for node in room.nodes}.values():
        name = node.name
        if draft.placing.recompute.get(name) == "none" and _is_training(node):
            yield f"--recompute {name}=layers"
        if draft.placing.offload.get(name) == "none" and room.without:
            if _is_training(node):
                yield f"--offload {name}=optimizer"
            elif can_weights_wait(draft, node):
                yield f"--offload {name}=weights"


def _find_large_enough(hosts: Iterable[Host], need: int) -> str:
    """The first host with so much memory, on each GPU if it has any; empty if there is none."""
    for host in hosts:
        room = min(host.gpus, default=host.memory)
        if not host.refused and room >= need:
            return host.name
    return ""


class _Part(NamedTuple):
    """Ordered by its bytes first."""

    size: int
    part: str
    node: str

    def __str__(self) -> str:
        return f"{self.part} of {self.node} {_gib(self.size)}"


def _find_largest(nodes: Iterable[PlannedNode], without: Parts) -> list[_Part]:
    """The four largest parts."""
    parts: set[_Part] = set()
    for node in nodes:
        for part, size in node.estimate.bytes.items():
            if part not in without:
                parts.add(_Part(size, part, node.name))
    return sorted(parts, reverse=True)[:4]


def _suggest_smaller(part: str) -> str:
    """The nearest way to less of a part."""
    if part == "copies":
        return "weights=pull, or readers in the writer's worker (workers: one)"
    if part == "snapshot":
        return "readers in the writer's worker (workers: one)"
    if part == "engine":
        return "another kernel (kernel)"
    if part in ("kv_cache", "cache", "outbox", "device_columns"):
        return "a lower batch, n, max_tokens or max_prompt_tokens"
    if part == "parked":
        return "a lower parked_tokens"
    if part in ("activations", "logits"):
        return "shorter rows: a lower max_tokens or max_prompt_tokens"
    return 'a smaller base, or dtype="bfloat16" for Models in float32 that are not trained'


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
