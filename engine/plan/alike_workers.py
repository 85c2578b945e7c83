"""Workers that are alike, so that one of each class stands for all.

Owns: the classes of places in the price of a Step, and names of many Workers in one. Does not own:
what is worked out for a class (step_price.py, passes/, explain/).

A plan of ten thousand devices has as many Workers, and hardly more than a few kinds of them for
each node. What a pass works out for one of a class holds for all of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from engine.plan.plan import PlannedNode


def unite_alike(labels: Mapping[str, Hashable]) -> dict[str, str]:
    """Find for each name the first one that has an equal label."""
    firsts: dict[Hashable, str] = {}
    return {name: firsts.setdefault(label, name) for name, label in labels.items()}


def unite_places(nodes: Iterable[PlannedNode], turns: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Find for each Worker the first Worker whose place is free and busy when its own is. A place is
    a Worker, or a group of Workers that take turns with devices; places are alike where the same
    nodes run. turns: the group of each Worker that takes turns.
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
