"""The path that bounds a Step: from a train node up through whom each waits for.

Owns: this path. Does not own: the waits themselves (engine/keep/flow/records.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.keep.flow.records import Flow, ReplicaFlow

_LEAST = 0.05
"""Share of the time waited below which a node does not wait: it bounds the Step itself."""


def critical_path(flow: Flow, train: Iterable[str]) -> list[str]:
    """Follow the waits from the train node that waits longest to the node that is worked in; the
    names on the way, that node first. It ends at a node that waits for something outside of the run
    above all. Empty where no train node has done or waited for anything.
    train: the names of train nodes.
    """
    nodes: dict[str, list[ReplicaFlow]] = {}
    for key, replica in flow.nodes.items():
        name, _, _ = key.rpartition("@")
        nodes.setdefault(name, []).append(replica)
    active = [name for name in train if any(map(_is_active, nodes.get(name, ())))]
    if not active:
        return []
    length = flow.end - flow.start
    node: str | None = max(active, key=lambda name: _mean(nodes[name], _sum_blamed))
    path: list[str] = []
    # Two nodes may wait for each other.
    while node is not None and node not in path:
        path.append(node)
        node = _find_blamed(nodes.get(node, []), length)
    return path[::-1]


def _find_blamed(replicas: list[ReplicaFlow], length: float) -> str | None:
    """The node that these wait for most; None if they hardly wait."""
    if not replicas or _mean(replicas, _sum_blamed) < _LEAST * length:
        return None
    if _mean(replicas, _outside) > _mean(replicas, _sum_blamed):
        return None
    blames: dict[str, float] = {}
    for replica in replicas:
        for blamed, seconds in replica.blames.items():
            node = blamed.partition("@")[0]
            blames[node] = blames.get(node, 0.0) + seconds
    if blames:
        return max(blames, key=lambda node: blames[node])
    return None


def sum_waits(replica: ReplicaFlow) -> float:
    """Seconds that a replica waited, whatever for."""
    return _sum_blamed(replica) + _outside(replica)


def _sum_blamed(replica: ReplicaFlow) -> float:
    """Seconds that it waited for other nodes."""
    return replica.for_rows + replica.for_weights + replica.for_turn + replica.for_room


def _outside(replica: ReplicaFlow) -> float:
    return replica.for_outside


def _is_active(replica: ReplicaFlow) -> bool:
    return replica.busy > 0 or sum_waits(replica) > 0


def _mean(replicas: list[ReplicaFlow], seconds_of: Callable[[ReplicaFlow], float]) -> float:
    return sum(map(seconds_of, replicas)) / len(replicas)
