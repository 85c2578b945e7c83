"""Engines: alone in their Workers, of one split, each rank on a GPU of its own.

Owns: engines and their devices. Does not own: who shares one (engine/plan/kernel_needs.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from engine.plan.draft import Draft
from engine.plan.kernel_needs import find_engines, kernel_name
from engine.plan.plan import PlannedNode
from engine.plan.refusals import add_fix
from engine.plan.worker_index import nodes_by_worker


def check_engines(draft: Draft) -> Iterator[str]:
    """Nothing else computes beside an engine, and its nodes ask for the same ranks of it."""
    nodes_on = nodes_by_worker(draft.nodes)
    for engine_nodes in find_engines(draft):
        yield from _check_alone(draft, engine_nodes, nodes_on)
        yield from _check_one_size(draft, engine_nodes)
        yield from _check_devices(draft, engine_nodes[0])


def _check_alone(
    draft: Draft, nodes: Sequence[PlannedNode], nodes_on: Mapping[str, Sequence[PlannedNode]]
) -> Iterator[str]:
    first = nodes[0]
    names = {node.name for node in nodes}
    kernel = kernel_name(draft.graph.node(first.name).operator, first.kernel)
    for worker in dict.fromkeys(chain.from_iterable(node.workers for node in nodes)):
        computing = (node.name for node in nodes_on[worker] if node.traits.computes)
        others = [name for name in computing if name not in names]
        if others:
            where = f"in {worker} with {', '.join(others)}"
            problem = f"{first.name} by {kernel} is {where}"
            fix = f"pin {first.name} to a worker in which nothing else computes"
            yield add_fix(f"{problem}, and it needs a process of its own", fix)


def _check_one_size(draft: Draft, nodes: Sequence[PlannedNode]) -> Iterator[str]:
    """An engine has one number of ranks and one of slots, whichever node opens it."""
    placing = draft.placing
    splits = {n.name: placing.tensor[n.name] for n in nodes if n.name in placing.tensor}
    slots = {n.name: n.layout.slots for n in nodes}
    options = (("tensor", splits, placing.tensor), ("slots", slots, placing.slots))
    for option, counts, asked in options:
        if len(set(counts.values())) > 1:
            wishes = ", ".join(f"{name}={count}" for name, count in counts.items())
            most = max(asked[name] for name in counts if name in asked)
            fix = ", ".join(f"{name}={most}" for name in counts)
            where = nodes[0].workers[0]
            yield add_fix(f"{option}: {wishes}, and they share an engine in {where}", fix)


def _check_devices(draft: Draft, node: PlannedNode) -> Iterator[str]:
    """Ranks inside of a Worker have a GPU each, which no Worker has at the same time."""
    name = node.name
    ranks = node.layout.inner
    if ranks < 2:
        return
    for worker in node.workers:
        host = draft.host_of(worker)
        gpus = draft.devices.get(worker, ())
        count = len(draft.cluster.on(host).gpus)
        if count and len(gpus) < ranks:
            problem = f"tensor: {name}={ranks} in {worker}, and there are {count} GPUs for it"
            fix = f"{name}={max(1, len(gpus))}"
            yield add_fix(problem, fix)
        for other, other_gpus in draft.devices.items():
            takes_turns = other == worker or other in draft.turns_of(worker)
            if takes_turns or draft.host_of(other) != host:
                continue
            if not set(gpus).isdisjoint(other_gpus):
                problem = f"tensor: {name}={ranks}, and {other} has one of the GPUs of {worker}"
                fix = f"turns: {worker},{other}, or fewer ranks"
                yield add_fix(problem, fix)
