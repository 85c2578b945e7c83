"""Which Workers of a plan are spare and where, and why a node cannot have a range of replicas.

Owns: both. Does not own: which Workers there are (place.py), nor when a spare one joins
(engine/coordinator/replicas.py).

A node with `replicas=2..8` has a place in the plan for each of the 8, so that chunks are cut for 8,
whatever is there. The first 2 are there at the beginning. Nodes together with it share all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from engine.plan.cluster import Cluster, Host
from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode
from engine.plan.refusals import add_fix


def find_spare_workers(draft: Draft, nodes: Sequence[PlannedNode]) -> tuple[str, ...]:
    """Find the Workers that are not there at the beginning. nodes: as they are placed."""
    if draft.placing.inproc:
        return ()
    workers: list[str] = []
    for node in nodes:
        if node.name in draft.placing.least:
            workers += node.workers[draft.placing.least[node.name] :]
    return tuple(dict.fromkeys(workers))


def add_spare_hosts(
    draft: Draft, nodes: Sequence[PlannedNode], hosts: Mapping[str, str]
) -> tuple[dict[str, str], Cluster]:
    """Add a host for each spare Worker that no pin names, where there are several hosts: it has the
    Worker's name, is as the host of the first replica, and is wherever there is room when the
    Worker joins. Returns these Workers' hosts, with the cluster that has them.
    """
    if not hosts:
        return {}, draft.cluster
    spare = find_spare_workers(draft, nodes)
    first_hosts: dict[str, str] = {}
    for node in nodes:
        for worker in node.workers:
            if worker in spare and worker not in draft.placing.hosts:
                first_hosts[worker] = hosts[node.workers[0]]
    spare_hosts: list[Host] = []
    for worker, first_host in first_hosts.items():
        spare_host = replace(draft.cluster.host(first_host), name=worker, node="")
        spare_hosts.append(spare_host)
    cluster = replace(draft.cluster, hosts=(*draft.cluster.hosts, *spare_hosts))
    return {worker: worker for worker in first_hosts}, cluster


def find_range_problems(draft: Draft, node: PlannedNode, least: int) -> Iterator[str]:
    """Why a node cannot have this range. placement_problems.py says what is wrong with its most."""
    most = draft.placing.replicas.get(node.name, least)
    wish = f"replicas: {node.name}={least}..{most}"
    if least < 1:
        fix = f"{node.name}=1..{most}"
        yield add_fix(f"{wish}: expected 1 replica or more at the beginning", fix)
    elif least > most:
        fix = f"{node.name}={most}..{least}"
        yield add_fix(f"{wish}: expected the least first", fix)


def find_sharing_problems(
    draft: Draft, nodes: Sequence[PlannedNode], turns: Sequence[tuple[str, ...]]
) -> Iterator[str]:
    """Spare Workers that others rely on. nodes: as they are placed."""
    spare = find_spare_workers(draft, nodes)
    if not spare:
        return
    yield from _find_unequal_ranges(draft, nodes)
    ranged_nodes = [node for node in nodes if node.name in draft.placing.least]
    ranged_workers = {node.workers for node in ranged_nodes}
    for node in nodes:
        shared = [worker for worker in node.workers if worker in spare]
        if shared and node.workers not in ranged_workers:
            other = next(each for each in ranged_nodes if shared[0] in each.workers).name
            problem = f"{node.name} is on {shared[0]}, which joins and leaves with {other}"
            fix = f"together: {other},{node.name}"
            yield add_fix(f"replicas: {problem}", fix)
    for group in turns:
        shared = [worker for worker in group if worker in spare]
        if shared:
            problem = f"{shared[0]} joins and leaves, and cannot take turns with devices"
            yield add_fix(f"turns: {problem}", "a number of replicas, no range")


def _find_unequal_ranges(draft: Draft, nodes: Sequence[PlannedNode]) -> Iterator[str]:
    """Nodes that are together have one range."""
    least, most = draft.placing.least, draft.placing.replicas
    firsts: dict[tuple[str, ...], str] = {}
    for node in nodes:
        if node.name not in least:
            continue
        name = node.name
        count = len(node.workers)
        first = firsts.setdefault(node.workers, name)
        if (least[first], most[first]) != (least[name], most[name]):
            ranges = f"{_show_range(draft, first)} and {_show_range(draft, name)}"
            fix = f"{name}={least[first]}..{most[first]}"
            yield add_fix(f"replicas: {ranges} share their Workers", fix)
        elif count != most[name]:
            problem = f"{_show_range(draft, name)}, but {name} is on {count} Workers"
            fix = f"{name}={least[name]}..{count}"
            yield add_fix(f"replicas: {problem}", fix)


def _show_range(draft: Draft, name: str) -> str:
    least, most = draft.placing.least[name], draft.placing.replicas[name]
    return f"{name}={least}..{most}"


def describe_spare(draft: Draft, nodes: Sequence[PlannedNode]) -> Iterator[str]:
    """Say which replicas come and go, in a line for the nodes of one range."""
    spare = find_spare_workers(draft, nodes)
    names_by_workers: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        if any(worker in spare for worker in node.workers):
            names_by_workers.setdefault(node.workers, []).append(node.name)
    for workers, names in names_by_workers.items():
        joining = [worker for worker in workers if worker in spare]
        if len(joining) > 1:
            what = f"{joining[0]} to {joining[-1]} are spare Workers, which join and leave"
        else:
            what = f"{joining[0]} is a spare Worker, which joins and leaves"
        count = f"{len(workers) - len(joining)} to {len(workers)} replicas"
        yield f"{', '.join(names)}: {count}; {what} while the run goes on"
