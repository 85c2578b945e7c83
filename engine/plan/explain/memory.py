"""What Workers need at their peak, against the memory that there is.

Owns: the words. Does not own: the numbers (engine/plan/cost).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dataflow.safe_text import shown_bytes
from engine.plan.cluster import Cluster
from engine.plan.cost.memory import HOST_PARTS, host_peak, lasting, peak
from engine.plan.cost.training_memory import OFFLOADED_PART
from engine.plan.plan import Plan, PlannedNode
from engine.plan.worker_index import nodes_by_worker, share_versions, workers_by_host
from engine.plan.worker_peaks import process_bytes, shared_process_bytes, worker_peak


def total_lines(plan: Plan) -> Iterator[str]:
    """Totals against each host's memory; several Workers have lines in their own section."""
    if len(plan.workers) == 1:
        worker = plan.workers[0]
        for text in worker_memory_lines(plan, worker, plan.nodes, alone=True):
            yield f"{worker}: {text}"
        return
    if names := unknown_models(plan, plan.nodes):
        yield f"all workers: memory unknown, since the parameters of {', '.join(names)} are"
    elif plan.cluster:
        nodes_of = nodes_by_worker(plan.nodes)
        for host, workers in workers_by_host(plan, plan.workers).items():
            hardware = plan.cluster.on(host)
            if not hardware.gpus:
                most = _host_peak(plan, {worker: nodes_of[worker] for worker in workers})
                needs = f"all workers: {most} on this host"
                if host:
                    needs = f"{host}: {', '.join(workers)}, {most}"
                yield f"{needs}, of {shown_bytes(hardware.memory)}"


def _host_peak(plan: Plan, workers: Mapping[str, Sequence[PlannedNode]]) -> str:
    """What the Workers of one host, with their nodes, need together."""
    parts_by_worker: dict[str, list[Mapping[str, int]]] = {}
    for worker, nodes in share_versions(plan, workers).items():
        parts_by_worker[worker] = [node.estimate.bytes for node in nodes]
    turns = [group for group in plan.turns if group[0] in workers]
    size = host_peak(parts_by_worker, turns) + shared_process_bytes(plan, workers)
    return f"at most {shown_bytes(size)}"


def worker_memory_lines(
    plan: Plan, worker: str, nodes: Sequence[PlannedNode], *, alone: bool = False
) -> Iterator[str]:
    """What a Worker with these nodes needs at most. alone: there is no other."""
    if names := unknown_models(plan, nodes):
        without = f"without them {shown_bytes(worker_peak(plan, worker, nodes))}"
        yield f"memory unknown, since the parameters of {', '.join(names)} are; {without}"
    elif plan.cluster and plan.cluster.on(plan.host_of(worker)).gpus:
        yield from _gpu_lines(plan, plan.cluster, worker, nodes)
    elif plan.cluster and alone:
        capacity = shown_bytes(plan.cluster.memory)
        yield f"{_peak(nodes, process=process_bytes(plan, worker))}, of {capacity}"
    else:
        yield _peak(nodes, process=process_bytes(plan, worker))


def _gpu_lines(
    plan: Plan, cluster: Cluster, worker: str, nodes: Sequence[PlannedNode]
) -> Iterator[str]:
    """What a Worker needs of each of its GPUs, and of its host."""
    host = plan.host_of(worker)
    hardware, numbers = cluster.on(host), list(plan.devices.get(worker, (0,)))
    gpu = f"GPU {', '.join(str(number) for number in numbers)}"
    if len(numbers) > 1:
        gpu = f"each of {gpu}"
    elif len(hardware.gpus) == 1:
        gpu = "the GPU"
    shares: list[PlannedNode] = []
    for node in nodes:
        estimate = node.estimate.on_each(len(numbers))
        shares.append(replace(node, estimate=estimate))
    capacity = shown_bytes(hardware.gpus[numbers[0]])
    yield f"{_peak(shares, HOST_PARTS)}, of {capacity} on {gpu}"
    room = f"{shown_bytes(hardware.memory)} on {host or 'this host'}"
    what = "rows"
    if any(OFFLOADED_PART in node.estimate.bytes for node in nodes):
        what = "rows and offloaded state"
    yield f"{shown_bytes(host_bytes(nodes))} of {what}, of {room}"


def host_bytes(nodes: Sequence[PlannedNode]) -> int:
    """Bytes of nodes on a GPU that are in the memory of its host."""
    total = 0
    for node in nodes:
        total += sum(node.estimate.bytes.get(part, 0) for part in HOST_PARTS)
    return total


def unknown_models(plan: Plan, nodes: Sequence[PlannedNode]) -> list[str]:
    """The Models of these nodes whose size is unknown."""
    unknown = {model.name for model in plan.models if model.parameters is None}
    read: dict[str, None] = {}  # an ordered set
    for node in nodes:
        if node.traits.computes:
            read |= dict.fromkeys(use.model for use in node.models)
    return [name for name in read if name in unknown]


def _peak(nodes: Sequence[PlannedNode], without: tuple[str, ...] = (), *, process: int = 0) -> str:
    """The most that nodes need which take turns, and what of it is there always. without: parts
    that do not count. process: bytes of the Worker's own process, which is there always.
    """
    total = process + peak((n.estimate.bytes for n in nodes), without=without)
    always = process + sum(lasting(n.estimate.bytes, without=without) for n in nodes)
    if total == always:
        return f"at most {shown_bytes(total)}, always"
    most = max(nodes, key=lambda node: node.estimate.total - lasting(node.estimate.bytes))
    more = f"{shown_bytes(total - always)} more while {most.name} runs"
    return f"at most {shown_bytes(total)}: {shown_bytes(always)} always, {more}"
