"""What Workers need at their peak, against the memory that there is.

Owns: the words. Does not own: the numbers (engine/plan/cost).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dataflow.shown import shown_bytes
from engine.plan.cluster import Cluster
from engine.plan.cost.memory import HOST_PARTS, host_peak, lasting, peak
from engine.plan.plan import Plan, PlannedNode
from engine.plan.worker_index import nodes_by_worker, workers_by_host
from engine.plan.worker_peaks import process_bytes, shared_process_bytes, worker_peak


def totals(plan: Plan) -> Iterator[str]:
    """Totals against each host's memory; several Workers have lines in their own section."""
    if len(plan.workers) == 1:
        told = holds(plan, plan.workers[0], plan.nodes, alone=True)
        yield from (f"{plan.workers[0]}: {text}" for text in told)
        return
    if names := unknown(plan, plan.nodes):
        yield f"all workers: memory unknown, since the parameters of {', '.join(names)} are"
    elif plan.cluster:
        on = nodes_by_worker(plan.nodes)
        for host, workers in workers_by_host(plan, plan.workers).items():
            here = {worker: on[worker] for worker in workers}
            yield from _host_memory(plan, plan.cluster.on(host), host, here)


def _host_memory(
    plan: Plan, cluster: Cluster, host: str, workers: Mapping[str, Sequence[PlannedNode]]
) -> Iterator[str]:
    """What the Workers of one host, with their nodes, need together."""
    if cluster.gpus:
        return
    parts = {w: [n.estimate.bytes for n in nodes] for w, nodes in workers.items()}
    turns = [group for group in plan.turns if group[0] in workers]
    most = f"at most {shown_bytes(host_peak(parts, turns) + shared_process_bytes(plan, workers))}"
    told = f"{host}: {', '.join(workers)}, {most}" if host else f"all workers: {most} on this host"
    yield f"{told}, of {shown_bytes(cluster.memory)}"


def holds(
    plan: Plan, worker: str, nodes: Sequence[PlannedNode], *, alone: bool = False
) -> Iterator[str]:
    """What a Worker with these nodes needs at most. alone: there is no other."""
    if names := unknown(plan, nodes):
        without = f"without them {shown_bytes(worker_peak(plan, worker, nodes))}"
        yield f"memory unknown, since the parameters of {', '.join(names)} are; {without}"
    elif plan.cluster and plan.cluster.on(plan.host_of(worker)).gpus:
        yield from _on_gpu(plan, plan.cluster, worker, nodes)
    elif plan.cluster and alone:
        capacity = shown_bytes(plan.cluster.memory)
        yield f"{_peak(nodes, process=process_bytes(plan, worker))}, of {capacity}"
    else:
        yield _peak(nodes, process=process_bytes(plan, worker))


def _on_gpu(
    plan: Plan, cluster: Cluster, worker: str, nodes: Sequence[PlannedNode]
) -> Iterator[str]:
    there = cluster.on(plan.host_of(worker))
    host, numbers = plan.host_of(worker), list(plan.devices.get(worker, (0,)))
    each = f"each of GPU {', '.join(map(str, numbers))}" if len(numbers) > 1 else ""
    gpu = each or ("the GPU" if len(there.gpus) == 1 else f"GPU {numbers[0]}")
    parts = [replace(n, estimate=n.estimate.on_each(len(numbers))) for n in nodes]
    yield f"{_peak(parts, HOST_PARTS)}, of {shown_bytes(there.gpus[numbers[0]])} on {gpu}"
    held = sum(n.estimate.bytes.get(part, 0) for n in nodes for part in HOST_PARTS)
    room = f"{shown_bytes(there.memory)} on {host or 'this host'}"
    yield f"{shown_bytes(held)} of rows, of {room}"


def unknown(plan: Plan, nodes: Sequence[PlannedNode]) -> list[str]:
    """The Models of these nodes whose size is unknown."""
    models = {m.name for m in plan.models if m.parameters is None}
    used = (u.model for n in nodes if n.traits.computes for u in n.models)
    return [name for name in dict.fromkeys(used) if name in models]


def _peak(nodes: Sequence[PlannedNode], without: tuple[str, ...] = (), *, process: int = 0) -> str:
    """process: of the Worker's own process, which is there always."""
    total = process + peak((n.estimate.bytes for n in nodes), without=without)
    last = process + sum(lasting(n.estimate.bytes, without=without) for n in nodes)
    most = max(nodes, key=lambda n: n.estimate.total - lasting(n.estimate.bytes))
    if total == last:
        return f"at most {shown_bytes(total)}, always"
    more = f"{shown_bytes(total - last)} more while {most.name} runs"
    return f"at most {shown_bytes(total)}: {shown_bytes(last)} always, {more}"
