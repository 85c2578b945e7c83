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

from dataflow.kernel import Offload, Recompute
from engine.plan.cluster import Cluster

Spread = Literal["one", "auto", "apart"]
Weights = Literal["auto", "pull", "collective", "ipc"]
Samples = Literal["brief", "full"]
Compiled = Literal["auto", "none", "layers"]
Search = Literal["auto", "off"]
Objective = Literal["seconds", "cost"]
LoadChoice = Literal["equal", "priced", "measured"]
StreamChoice = Literal["auto", "off", "ordered", "arrival"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Wishes for Workers, which options of these names explain; the planner decides the rest."""

    workers: Spread = "auto"
    kernel: Mapping[str, str] = field(default_factory=dict)
    pin: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The Workers of a node, several for its replicas or ranks."""
    together: tuple[tuple[str, ...], ...] = ()
    replicas: Mapping[str, int] = field(default_factory=dict)
    """The most, for nodes whose replicas come and go."""
    least: Mapping[str, int] = field(default_factory=dict)
    """How many of these there are at the beginning."""
    chunks: Mapping[str, int] = field(default_factory=dict)
    spread: Mapping[str, int] = field(default_factory=dict)
    """Of generations that are not named, the planner chooses; as of the next."""
    tail: Mapping[str, float] = field(default_factory=dict)
    loads: LoadChoice = "priced"
    """How much unlike replicas and ranks get; `measured` begins with the prices."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    tensor: Mapping[str, int] = field(default_factory=dict)
    context: Mapping[str, int] = field(default_factory=dict)
    """Ranks that divide the tokens of the same rows, of nodes that train or read finished rows."""
    shard: bool = False
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    """Of train nodes that are not named, the planner chooses; as of the next."""
    offload: Mapping[str, Offload] = field(default_factory=dict)
    microbatch: Mapping[str, int] = field(default_factory=dict)
    """Tokens of one forward pass or micro-batch of nodes that compute."""
    slots: Mapping[str, int] = field(default_factory=dict)
    """Rows that a replica of a generation decodes at once."""
    compiled: Compiled = "auto"
    turns: tuple[tuple[str, ...], ...] = ()
    hosts: Mapping[str, str] = field(default_factory=dict)
    """The host of a Worker, by name or by a label (`gpu:H200`); the planner spreads all others."""
    stream: StreamChoice = "off"
    """`auto`: the price of whole plans chooses."""
    part_tokens: int = 0
    """Tokens of answers in a part of a streamed Step; 0: the planner chooses."""
    live_tokens: int = 0
    """Tokens of answers, of all outstanding prompts, beyond one Step's; 0: what memory holds."""
    search: Search = "off"
    """`auto`: the price of whole plans chooses layouts and places that nobody asked for."""
    objective: Objective = "seconds"
    """What the search makes least."""
    sharded: tuple[str, ...] = ()
    """Train nodes whose ranks each keep a part, besides all of them with `shard`."""
    weights: Weights = "auto"
    inproc: bool = False
    """All nodes are on `main`; of the other wishes for places only chunks count (also by replicas).
    """
    samples: Samples = "brief"
    """What is recorded of a Step's rows."""
    simulated: bool = False
    """Nothing of the plan runs, so that what its kernels need does not have to be here."""


def resolve_labels(placing: Placing, cluster: Cluster) -> tuple[Placing, Cluster]:
    """Put the name of a host in the place of each label, in both: of those that have it, the one
    with fewest Workers that were pinned so far. A label that no host has stays.
    """
    hosts_by_worker = dict(placing.hosts)
    pinned_counts = Counter(placing.hosts.values())
    labels: dict[str, tuple[str, str]] = {}
    heaps: dict[str, list[tuple[int, int]]] = {}
    """Label -> (Workers, place in the cluster) of its hosts, a heap; some are out of date."""
    for worker, label in placing.hosts.items():
        key, _, label_value = label.partition(":")
        if label not in heaps:
            heaps[label] = _make_heap(key, label_value, cluster, pinned_counts)
        if heaps[label]:
            name = _take_idlest(heaps[label], cluster, pinned_counts)
            hosts_by_worker[worker] = name
            pinned_counts[name] += 1
            labels[name] = (key, label_value)
    hosts = [replace(host, label=labels.get(host.name)) for host in cluster.hosts]
    return replace(placing, hosts=hosts_by_worker), replace(cluster, hosts=tuple(hosts))


def _make_heap(
    key: str, label_value: str, cluster: Cluster, pinned_counts: Mapping[str, int]
) -> list[tuple[int, int]]:
    """(Workers, place in the cluster) of each usable host with a label, fewest Workers first."""
    heap: list[tuple[int, int]] = []
    for place, host in enumerate(cluster.hosts):
        if not host.refused and host.labels.get(key) == label_value:
            heap.append((pinned_counts[host.name], place))
    return sorted(heap)


def _take_idlest(
    heap: list[tuple[int, int]], cluster: Cluster, pinned_counts: Mapping[str, int]
) -> str:
    """The host with fewest Workers, the first of several. Counts only grow, so that an entry that
    is out of date is too early, never too late.
    """
    while True:
        count, place = heap[0]
        name = cluster.hosts[place].name
        if pinned_counts[name] == count:
            heapq.heapreplace(heap, (count + 1, place))
            return name
        heapq.heapreplace(heap, (pinned_counts[name], place))
