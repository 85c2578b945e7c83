"""The user's wishes for places: the planner's input besides the graph and the machine.

Owns: the data type. Does not own: the options (engine/options.py), the decisions (passes/place.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from heapq import heapreplace
from typing import Literal

from engine.plan.cluster import Cluster

Spread = Literal["one", "auto", "apart"]
Weights = Literal["auto", "pull", "collective"]
Samples = Literal["brief", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Wishes for Workers, which the options of these names explain; the planner decides the rest.

    pin: the Workers of a node, several for its replicas or ranks. hosts: of Workers, by name or by
    a label (`gpu:H200`); all others are on the first. inproc: all nodes are on `main`; of the rest
    only chunks count (also by replicas). least: of nodes whose replicas come and go, how many there
    are at the beginning; `replicas` are the most. samples: what is recorded of a Step's rows.
    """

    workers: Spread = "auto"
    kernel: Mapping[str, str] = field(default_factory=dict)
    pin: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    replicas: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    chunks: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    tensor: Mapping[str, int] = field(default_factory=dict)
    shard: bool = False
    turns: tuple[tuple[str, ...], ...] = ()
    hosts: Mapping[str, str] = field(default_factory=dict)
    weights: Weights = "auto"
    inproc: bool = False
    samples: Samples = "brief"


def on_hosts(placing: Placing, cluster: Cluster) -> tuple[Placing, Cluster]:
    """Both, with the name of a host in the place of each label: of those that have it, the one with
    fewest Workers that were pinned so far. A label that no host has stays.
    """
    named, taken = dict(placing.hosts), Counter(placing.hosts.values())
    labels: dict[str, tuple[str, str]] = {}
    queues: dict[str, list[tuple[int, int, str]]] = {}
    for worker, label in placing.hosts.items():
        key, _, value = label.partition(":")
        if label not in queues:
            having = (h for h in cluster.hosts if not h.refused and h.labels.get(key) == value)
            queues[label] = sorted((taken[h.name], i, h.name) for i, h in enumerate(having))
        if name := _idlest(queues[label], taken):
            named[worker] = name
            taken[name] += 1
            labels[name] = (key, value)
    hosts = tuple(replace(h, label=labels.get(h.name)) for h in cluster.hosts)
    return replace(placing, hosts=named), replace(cluster, hosts=hosts)


def _idlest(queue: list[tuple[int, int, str]], taken: Mapping[str, int]) -> str:
    """The host of a heap of (Workers, place in the cluster, name) with fewest Workers; empty if
    there is none. What others have taken since is found as it comes to the top.
    """
    while queue and queue[0][0] < taken[queue[0][2]]:
        _, place, name = queue[0]
        heapreplace(queue, (taken[name], place, name))
    return queue[0][2] if queue else ""
