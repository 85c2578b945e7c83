"""Workers that are alike, so that one of each class stands for all.

Owns: the classes of places in the price of a Step, and names of many Workers in one. Does not own:
what is worked out for a class (step_price.py, passes/, explain/).

A plan of ten thousand devices has as many Workers, and hardly more than a few kinds of them for
each node. What a pass works out for one of a class holds for all of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from engine.plan.cluster import Cluster
from engine.plan.plan import Decisions, Plan, PlannedNode
from engine.plan.worker_peaks import process_bytes


def unite_alike(labels: Mapping[str, Hashable]) -> dict[str, str]:
    """Find for each name the first one that has an equal label."""
    firsts: dict[Hashable, str] = {}
    return {name: firsts.setdefault(label, name) for name, label in labels.items()}


def group_alike_workers(
    plan: Plan, nodes_on: Mapping[str, Sequence[PlannedNode]]
) -> list[list[str]]:
    """Group the Workers that have the same nodes on the same hardware, and need as much for them.
    nodes_on: of each Worker, with its own bytes.
    """
    labels: dict[str, Hashable] = {}
    hardware: dict[str, Hashable] = {}
    for worker, nodes in nodes_on.items():
        host = plan.host_of(worker)
        if host not in hardware and plan.cluster is not None:
            hardware[host] = plan.cluster.on(host).describe()
        needs = tuple((node.name, node.estimate.total) for node in nodes)
        process = process_bytes(plan, worker)
        labels[worker] = (needs, hardware.get(host), len(plan.devices.get(worker, ())), process)
    members: dict[str, list[str]] = {}
    for worker, first in unite_alike(labels).items():
        members.setdefault(first, []).append(worker)
    return list(members.values())


def name_alike(names: Sequence[str]) -> str:
    """Up to three names; of more Workers or hosts the first, the last and their number."""
    if len(names) < 4:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)})"


def list_unlike_hosts(
    decided: Decisions, cluster: Cluster, workers: Mapping[str, Sequence[str]]
) -> list[str]:
    """List the hosts that need their memory otherwise than each other, the first of each class.
    workers: those of each host, all of them.
    """
    labels: dict[str, Hashable] = {}
    for host, names in workers.items():
        hardware = cluster.on(host)
        numbers = {worker: number for number, worker in enumerate(names)}
        parts: list[Hashable] = [hardware.gpus, hardware.memory]
        for worker in names:
            nodes = decided.nodes_on(worker)
            turns = decided.turns_of(worker)
            parts += [
                tuple((node.name, node.workers[0] == worker) for node in nodes),
                decided.devices.get(worker),
                decided.processes.get(worker),
                tuple(numbers.get(member, -1) for member in turns),
            ]
        labels[host] = tuple(parts)
    first_of_each = unite_alike(labels).values()
    return list(dict.fromkeys(first_of_each))


def unite_places(
    nodes: Iterable[PlannedNode], turns: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """Find for each Worker a place that is free and busy when its own is. A place is a Worker, or
    the first of those that take turns with devices; places are alike where the same nodes run.
    turns: the group of each Worker that takes turns.
    """
    place_of: dict[str, str] = {}
    nodes_of: dict[str, list[str]] = {}
    for node in nodes:
        for worker in node.workers:
            place = place_of.setdefault(worker, turns.get(worker, (worker,))[0])
            names = nodes_of.setdefault(place, [])
            if not names or names[-1] != node.name:
                names.append(node.name)
    for worker, group in turns.items():
        place_of.setdefault(worker, group[0])  # it runs none of these nodes, but wakes there
    firsts = unite_alike({place: tuple(names) for place, names in nodes_of.items()})
    return {worker: firsts.get(place, place) for worker, place in place_of.items()}
