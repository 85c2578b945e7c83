"""Which Workers of a plan are spare and where, and why a node cannot have a range of replicas.

Owns: both. Does not own: which Workers there are (place.py), nor when a spare one joins
(engine/coordinator/replicas.py).

A node with `replicas=2..8` has a place in the plan for each of the 8, so that chunks are cut for 8,
whatever is there. The first 2 are there at the beginning. Nodes together with it share all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from engine.plan.cluster import Cluster
from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode


def spare_workers(draft: Draft, nodes: Sequence[PlannedNode]) -> tuple[str, ...]:
    """Those that are not there at the beginning. nodes: as they are placed."""
    least = draft.placing.least
    found = (n.workers[least[n.name] :] for n in nodes if n.name in least)
    return () if draft.placing.inproc else tuple(dict.fromkeys(w for some in found for w in some))


def spare_places(
    draft: Draft, nodes: Sequence[PlannedNode], hosts: Mapping[str, str]
) -> tuple[dict[str, str], Cluster]:
    """The host of each spare Worker that no pin names, on several hosts: one of its own, with the
    Worker's name, wherever there is room when it joins. It is as the host of the first replica.
    Returns them with the cluster that has them.
    """
    if not hosts:
        return {}, draft.cluster
    spare, pinned = spare_workers(draft, nodes), draft.placing.hosts
    firsts = {w: hosts[n.workers[0]] for n in nodes for w in n.workers if w in spare}
    own = {w: first for w, first in firsts.items() if w not in pinned}
    made = (replace(draft.cluster.host(first), name=w, node="") for w, first in own.items())
    cluster = replace(draft.cluster, hosts=(*draft.cluster.hosts, *made))
    return {worker: worker for worker in own}, cluster


def range_problems(draft: Draft, node: PlannedNode, least: int) -> Iterator[str]:
    """Why a node cannot have this range; what is wrong with its most, place.py says."""
    most = draft.placing.replicas.get(node.name, least)
    if least < 1:
        problem = "expected 1 replica or more at the beginning"
        yield f"replicas: {node.name}={least}..{most}: {problem}. Fix: {node.name}=1..{most}."
    elif least > most:
        problem = "expected the least first"
        yield f"replicas: {node.name}={least}..{most}: {problem}. Fix: {node.name}={most}..{least}."


def sharing_problems(
    draft: Draft, nodes: Sequence[PlannedNode], turns: Sequence[tuple[str, ...]]
) -> Iterator[str]:
    """Spare Workers that others rely on. nodes: as they are placed."""
    spare = spare_workers(draft, nodes)
    if not spare:
        return
    yield from _ranges(draft, nodes)
    named = {n.name: n.workers for n in nodes if n.name in draft.placing.least}
    for node in nodes:
        shared = [w for w in node.workers if w in spare]
        if shared and node.workers not in named.values():
            other = next(name for name, workers in named.items() if shared[0] in workers)
            problem = f"{node.name} is on {shared[0]}, which joins and leaves with {other}"
            yield f"replicas: {problem}. Fix: together: {other},{node.name}."
    for group in turns:
        if shared := [w for w in group if w in spare]:
            problem = f"{shared[0]} joins and leaves, and cannot take turns with devices"
            yield f"turns: {problem}. Fix: a number of replicas, no range."


def _ranges(draft: Draft, nodes: Sequence[PlannedNode]) -> Iterator[str]:
    """Nodes that are together have one range."""
    least, most = draft.placing.least, draft.placing.replicas
    seen: dict[tuple[str, ...], str] = {}
    for node in (n for n in nodes if n.name in least):
        first = seen.setdefault(node.workers, node.name)
        if (least[first], most[first]) != (least[node.name], most[node.name]):
            here, there = _shown(draft, first), _shown(draft, node.name)
            fix = f"{node.name}={least[first]}..{most[first]}"
            yield f"replicas: {here} and {there} share their Workers. Fix: {fix}."
        elif len(node.workers) != most[node.name]:
            fix = f"{node.name}={least[node.name]}..{len(node.workers)}"
            where = f"{node.name} is on {len(node.workers)} Workers"
            yield f"replicas: {_shown(draft, node.name)}, but {where}. Fix: {fix}."


def _shown(draft: Draft, name: str) -> str:
    return f"{name}={draft.placing.least[name]}..{draft.placing.replicas[name]}"


def spare_notes(draft: Draft, nodes: Sequence[PlannedNode]) -> Iterator[str]:
    """In words, a line for the nodes of one range."""
    by_workers: dict[tuple[str, ...], list[str]] = {}
    spare = spare_workers(draft, nodes)
    for node in nodes:
        if any(w in spare for w in node.workers):
            by_workers.setdefault(node.workers, []).append(node.name)
    for workers, names in by_workers.items():
        joins = [w for w in workers if w in spare]
        several = f"{joins[0]} to {joins[-1]} are spare Workers, which join and leave"
        told = (
            several if len(joins) > 1 else f"{joins[0]} is a spare Worker, which joins and leaves"
        )
        count = f"{len(workers) - len(joins)} to {len(workers)} replicas"
        yield f"{', '.join(names)}: {count}; {told} while the run goes on"
