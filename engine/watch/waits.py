"""Who waits for whom, in words.

Owns: these sentences. Does not own: how a wait is told from work (engine/keep/flow/activity.py),
the stretch of time that they are about (engine/keep/flow/stretch.py).

Each sentence begins with the node that waits, and names what it waits for. The greatest wait comes
first: what most of a run waits for is what bounds it. Of a node with several replicas, one that is
much slower than the others is named as well.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.keep.flow.records import Flow, ReplicaFlow, WorkerFlow

LEAST_SHARE = 0.05
"""Of a stretch: shorter waits are not told."""
LONG = 10
"""Seconds from which it is told that a kernel still computes."""
SLOWER = 1.5
"""Times slower than the median of its siblings: a replica that is told."""
_MOSTLY = 0.75
"""Of a node's waits: a kind that has so much is told."""
_WITH_MODEL = ("train", "decode", "forward")
"""Kinds of work that compute with a Model."""
_LEAST_ROWS = 2
"""Rows of a replica from which its rate is told."""

_WHY = {
    "for_rows": "",
    "for_weights": " (new weights)",
    "for_turn": " (its turn)",
    "for_room": " (no room for more prompts)",
}
"""A wait's kind -> what is said of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A node waits this share of the time for `blamed`: a node, one replica of it, or something
    outside of the run (`environments`).
    """

    node: str
    share: float
    blamed: str
    why: str
    """The field of ReplicaFlow that most of it is in; `for_rows` if no kind of waits for nodes has
    most.
    """

    @property
    def blamed_node(self) -> str:
        """The node that it waits for, without the replica."""
        return self.blamed.partition("@")[0]

    def __str__(self) -> str:
        percent = self.share * 100
        why = _WHY.get(self.why, "")
        return f"{self.node} waits {percent:.0f} % for {self.blamed}{why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A replica makes its rows so many times slower than the median of the others."""

    replica: str
    node: str
    times: float

    def __str__(self) -> str:
        return (
            f"{self.replica} is {self.times:.1f} times slower than the other replicas of "
            f"{self.node}"
        )


def sentences(flow: Flow, plan: Mapping[str, Any], *, live: bool = False) -> list[str]:
    """Tell the waits that matter in a stretch of time, the greatest first. plan: plan.json. live:
    the stretch ends now; behind the first wait comes what has computed for long.
    """
    slow = slow_replicas(flow, plan)
    waits = node_waits(flow, plan)
    first_wait = waits[:1]
    blamed_nodes = {wait.blamed_node for wait in first_wait}
    lines = list(map(str, first_wait))
    if live:
        lines += long_under_way(flow, plan)
    # A slow replica of the node that is blamed says why that wait is so long.
    lines += [str(replica) for replica in slow if replica.node in blamed_nodes]
    lines += map(str, waits[1:])
    lines += [str(replica) for replica in slow if replica.node not in blamed_nodes]
    return lines


def long_under_way(flow: Flow, plan: Mapping[str, Any]) -> list[str]:
    """`score has computed for 25 s`, `rollout has waited for environments for 25 s`: nodes in what
    they do at the stretch's end, in the order of the plan; of several replicas the longest.
    """
    longest: dict[str, WorkerFlow] = {}
    for worker in flow.workers.values():
        other = longest.get(worker.doing)
        if other is None or worker.doing_for > other.doing_for:
            longest[worker.doing] = worker
    lines: list[str] = []
    for node in plan["nodes"]:
        name = node["name"]
        worker = longest.get(name)
        if worker is None or worker.doing_for < LONG:
            continue
        if worker.waits_for:
            does = f"waited for {worker.waits_for}"
        else:
            does = "computed"
        lines.append(f"{name} has {does} for {int(worker.doing_for)} s")
    return lines


def node_waits(flow: Flow, plan: Mapping[str, Any]) -> list[Wait]:
    """Waits of the nodes that compute with a Model, the greatest first. All other nodes wait for
    these by their nature. A train node's comes before one for the same node that is hardly greater:
    the train node is what a run is about, and so its first sentence does not flicker.
    """
    works = {node["name"]: node["work"] for node in plan["nodes"]}
    replicas: dict[str, list[ReplicaFlow]] = defaultdict(list)
    for key, replica in flow.nodes.items():
        node = key.partition("@")[0]
        if works.get(node) in _WITH_MODEL:
            replicas[node].append(replica)
    length = flow.end - flow.start
    waits: list[Wait] = []
    for node, node_replicas in replicas.items():
        waits += _waits(node, node_replicas, length)
        waits += _outside_waits(node, node_replicas, length)
    waits.sort(key=lambda wait: -wait.share)
    for wait in waits:
        greatest = waits[0]
        is_near = wait.share > greatest.share - LEAST_SHARE
        has_same_cause = wait.blamed_node == greatest.blamed_node
        if works[wait.node] == "train" and has_same_cause and is_near:
            return [wait, *(other for other in waits if other is not wait)]
    return waits


def _waits(node: str, replicas: list[ReplicaFlow], seconds: float) -> Iterator[Wait]:
    """The waits of a node, as the mean over its replicas in so many seconds: the greatest, and all
    others that are not short. None of one that hardly waits.

    One that does not work at all waits all the same: a Step may take longer than the stretch.
    """
    length = seconds * len(replicas)
    kinds: dict[str, float] = {}
    for kind in _WHY:
        kinds[kind] = sum(getattr(replica, kind) for replica in replicas)
    waited = sum(kinds.values())
    if length <= 0 or waited < LEAST_SHARE * length:
        return
    most = max(kinds, key=lambda name: kinds[name])
    # Which of the kinds a blame is of is not recorded.
    if kinds[most] >= _MOSTLY * waited:
        why = most
    else:
        why = "for_rows"
    blames: Counter[str] = Counter()
    for replica in replicas:
        blames.update(replica.blames)
    for rank, (blamed, blame) in enumerate(_rank_blames(blames)):
        share = min(1.0, blame / length)
        if rank == 0 or share >= LEAST_SHARE:
            yield Wait(node=node, share=share, blamed=blamed, why=why)


def _outside_waits(node: str, replicas: list[ReplicaFlow], seconds: float) -> Iterator[Wait]:
    """What a node's kernels wait for outside of the run, as the mean over its replicas."""
    length = seconds * len(replicas)
    waited: Counter[str] = Counter()
    for replica in replicas:
        waited.update(replica.outside)
    for reason, of_reason in waited.items():
        if length > 0 and of_reason >= LEAST_SHARE * length:
            share = min(1.0, of_reason / length)
            yield Wait(node=node, share=share, blamed=reason, why="for_outside")


def _rank_blames(blames: Mapping[str, float]) -> list[tuple[str, float]]:
    """Rank who is blamed for how many seconds, the greatest first: a node with all its replicas,
    or the one of them that has half of its blame.
    """
    by_node: dict[str, float] = defaultdict(float)
    for name, seconds in blames.items():
        node, _, _ = name.partition("@")
        by_node[node] += seconds
    shares: list[tuple[str, float]] = []
    for node, of_node in by_node.items():
        prefix = f"{node}@"
        replicas = [name for name in blames if name.startswith(prefix)]
        worst = max(replicas, key=lambda name: blames[name], default="")
        if worst and blames[worst] >= 0.5 * of_node:
            shares.append((worst, blames[worst]))
        else:
            shares.append((node, of_node))
    return sorted(shares, key=lambda blame: -blame[1])


def slow_replicas(flow: Flow, plan: Mapping[str, Any]) -> list[Slow]:
    """Replicas that need SLOWER times the seconds a row of the median of their siblings."""
    ranks = {node["name"]: _ranks(node) for node in plan["nodes"]}
    by_node: dict[str, dict[str, float]] = defaultdict(dict)
    for key, replica in flow.nodes.items():
        node = key.partition("@")[0]
        has_rate = replica.rows >= _LEAST_ROWS and replica.busy > 0
        # Ranks do one thing together, so that none of them has a pace of its own.
        if ranks.get(node, 1) == 1 and has_rate:
            by_node[node][key] = replica.busy / replica.rows
    slow: list[Slow] = []
    for node, paces in by_node.items():
        for key, pace in paces.items():
            others = [other for name, other in paces.items() if name != key]
            if not others:
                continue
            usual = statistics.median(others)
            if pace >= SLOWER * usual:
                slow.append(Slow(replica=key, node=node, times=pace / usual))
    return sorted(slow, key=lambda slow: -slow.times)


def _ranks(node: Mapping[str, Any]) -> int:
    layout = node.get("layout", {})
    return math.prod(layout.get(axis, 1) for axis in ("data", "tensor", "context"))
