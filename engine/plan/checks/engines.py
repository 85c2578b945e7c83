"""Engines: alone in their Workers, of one split, each rank on a GPU of its own.

Owns: engines and their devices. Does not own: who shares one (engine/plan/kernel_needs.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engine.plan.draft import Draft
from engine.plan.kernel_needs import engines as all_engines
from engine.plan.kernel_needs import kernel_name
from engine.plan.plan import PlannedNode
from engine.plan.worker_index import nodes_by_worker


def engines(draft: Draft) -> Iterator[str]:
    """Nothing else computes beside an engine, and its nodes ask for the same ranks of it."""
    on = nodes_by_worker(draft.nodes)
    for nodes in all_engines(draft):
        yield from _alone(draft, nodes, on)
        yield from _one_split(draft, nodes)
        yield from _devices(draft, nodes)


def _alone(
    draft: Draft, nodes: Sequence[PlannedNode], on: Mapping[str, Sequence[PlannedNode]]
) -> Iterator[str]:
    first, names = nodes[0], {n.name for n in nodes}
    kernel = kernel_name(draft.graph.node(first.name).operator, first.kernel)
    for worker in dict.fromkeys(w for n in nodes for w in n.workers):
        beside = [n.name for n in on[worker] if n.traits.computes]
        if others := [name for name in beside if name not in names]:
            problem = f"{first.name} by {kernel} is in {worker} with {', '.join(others)}"
            own = f"pin {first.name} to a worker in which nothing else computes"
            yield f"{problem}, and it needs a process of its own. Fix: {own}."


def _one_split(draft: Draft, nodes: Sequence[PlannedNode]) -> Iterator[str]:
    tensor = draft.placing.tensor
    asked = {n.name: tensor[n.name] for n in nodes if n.name in tensor}
    if len(set(asked.values())) > 1:
        shown = ", ".join(f"{name}={count}" for name, count in asked.items())
        most = max(asked.values())
        fix = ", ".join(f"{name}={most}" for name in asked)
        yield f"tensor: {shown}, and they share an engine in {nodes[0].workers[0]}. Fix: {fix}."


def _devices(draft: Draft, nodes: Sequence[PlannedNode]) -> Iterator[str]:
    """Ranks inside of a Worker have a GPU each, which no Worker has at the same time."""
    name, ranks = nodes[0].name, nodes[0].layout.inner
    for worker in nodes[0].workers if ranks > 1 else ():
        mine, count = (
            draft.devices.get(worker, ()),
            len(draft.cluster.on(draft.host_of(worker)).gpus),
        )
        if count and len(mine) < ranks:
            problem = f"tensor: {name}={ranks} in {worker}, and there are {count} GPUs for it"
            yield f"{problem}. Fix: {name}={max(1, len(mine))}."
        for other, theirs in draft.devices.items():
            here = draft.host_of(other) == draft.host_of(worker)
            turns = other == worker or other in draft.turns_of(worker)
            if here and not turns and set(mine) & set(theirs):
                problem = f"tensor: {name}={ranks}, and {other} has one of the GPUs of {worker}"
                yield f"{problem}. Fix: turns: {worker},{other}, or fewer ranks."
