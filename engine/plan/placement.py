"""The user's wishes for places: the planner's input besides the graph and the machine.

Owns: the data type. Does not own: the options (engine/plan/options.py), the decisions
(passes/place.py).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from engine.plan.cluster import Cluster

Spread = Literal["one", "auto", "apart"]
Weights = Literal["auto", "pull", "collective"]
Samples = Literal["brief", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Wishes for Workers, which the options of these names explain; the planner decides the rest.

    pin: the Workers of a node, several for its replicas or ranks. hosts: of Workers, by name or by
    a label (`gpu:H200`); the planner spreads all others. inproc: all nodes are on `main`; of the
    rest only chunks count (also by replicas). least: of nodes whose replicas come and go, how many
    there are at the beginning; `replicas` are the most. samples: what is recorded of a Step's rows.
    simulated: nothing of the plan runs, so that what its kernels need does not have to be here.
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
    simulated: bool = False


def on_hosts(placing: Placing, cluster: Cluster) -> tuple[Placing, Cluster]:
    """Both, with the name of a host in the place of each label: of those that have it, the one with
    fewest Workers that were pinned so far. A label that no host has stays.
    """
    named, taken = dict(placing.hosts), Counter(placing.hosts.values())
    labels: dict[str, tuple[str, str]] = {}
    having: dict[str, list[tuple[int, int]]] = {}
    """Label -> (Workers, place in the cluster) of its hosts, a heap; some are out of date."""
    for worker, label in placing.hosts.items():
        key, _, value = label.partition(":")
        if label not in having:
            known = enumerate(cluster.hosts)
            fit = [i for i, h in known if not h.refused and h.labels.get(key) == value]
            having[label] = sorted((taken[cluster.hosts[i].name], i) for i in fit)
        if having[label]:
            named[worker] = name = _idlest(having[label], cluster, taken)
            taken[name] += 1
            labels[name] = (key, value)
    hosts = tuple(replace(h, label=labels.get(h.name)) for h in cluster.hosts)
    return replace(placing, hosts=named), replace(cluster, hosts=hosts)


def _idlest(heap: list[tuple[int, int]], cluster: Cluster, taken: Mapping[str, int]) -> str:
    """The host with fewest Workers, the first of several. Counts only grow, so that an entry that
    is out of date is too early, never too late.
    """
    while True:
        count, place = heap[0]
        name = cluster.hosts[place].name
        if taken[name] == count:
            heapq.heapreplace(heap, (count + 1, place))
            return name
        heapq.heapreplace(heap, (taken[name], place))
