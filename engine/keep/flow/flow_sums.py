"""Several stretches of time as one.

Owns: the sum of Flows. Does not own: what a Flow holds (records.py), which stretch stands for a run
(stretch.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from engine.keep.flow.records import CutFlow, EdgeFlow, Flow, ReplicaFlow, WeightFlow


def sum_flows(flows: Iterable[Flow]) -> Flow:
    """One stretch of several, in order: sums of seconds and counts, the last one's states. Of
    several phases only the last one's count: each has nodes of its own. Raises ValueError without
    any.
    """
    of_all = list(flows)
    if not of_all:
        raise ValueError("expected at least one Flow, found none")
    last_phase = [flow for flow in of_all if flow.phase == of_all[-1].phase]
    if len(last_phase) == 1:
        return last_phase[0]
    last = last_phase[-1]
    return msgspec.structs.replace(
        last,
        start=last.end - sum(flow.end - flow.start for flow in last_phase),
        nodes=_nodes(last_phase),
        edges=_merge_all([flow.edges for flow in last_phase], _edges),
        weights=_merge_all([flow.weights for flow in last_phase], _weights),
        cuts=_merge_all([flow.cuts for flow in last_phase], _cuts),
        workers=_merge_all([flow.workers for flow in last_phase], lambda many: many[-1]),
    )


def _nodes(flows: list[Flow]) -> dict[str, ReplicaFlow]:
    """A replica was idle in the stretches in which it was not there."""
    merged = _merge_all([flow.nodes for flow in flows], _replicas)
    for name, replica in merged.items():
        away = sum(flow.end - flow.start for flow in flows if name not in flow.nodes)
        if away > 0:
            merged[name] = msgspec.structs.replace(replica, idle=replica.idle + away)
    return merged


T = TypeVar("T")


def _merge_all(parts: list[dict[str, T]], merge: Any) -> dict[str, T]:
    by_key: dict[str, list[T]] = defaultdict(list)
    for part in parts:
        for key, part_flow in part.items():
            by_key[key].append(part_flow)
    return {key: merge(many) for key, many in by_key.items()}


def _sum_fields(many: list[Any], *names: str) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for name in names:
        sums[name] = sum(getattr(each, name) for each in many)
    return sums


def _replicas(many: list[ReplicaFlow]) -> ReplicaFlow:
    blames: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    for each in many:
        blames.update(each.blames)
        outside.update(each.outside)
    waits = ("for_rows", "for_weights", "for_turn", "for_room", "for_outside")
    states = ("busy", *waits, "idle")
    return msgspec.structs.replace(
        many[-1],
        blames=dict(blames),
        outside=dict(outside),
        device_peak=max(replica.device_peak for replica in many),
        **_sum_fields(many, *states, "chunks", "rows", "tokens"),
    )


def _edges(many: list[EdgeFlow]) -> EdgeFlow:
    return msgspec.structs.replace(many[-1], **_sum_fields(many, "rows", "bytes"))


def _weights(many: list[WeightFlow]) -> WeightFlow:
    return msgspec.structs.replace(many[-1], **_sum_fields(many, "loads", "seconds", "bytes"))


def _cuts(many: list[CutFlow]) -> CutFlow:
    lags = [0] * max(len(each.lags) for each in many)
    for each in many:
        for lag, count in enumerate(each.lags):
            lags[lag] += count
    return msgspec.structs.replace(many[-1], lags=lags)
