"""The flow of one replica and of one Worker in a stretch, made of what the parts have counted.

Owns: how these counts become records. Does not own: the counting (activity.py, counts.py,
outside.py), when a stretch ends (fold.py), the records' types (records.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from engine.keep.flow.activity import ReplicaSeconds
from engine.keep.flow.counts import StretchCounts
from engine.keep.flow.outside import OutsideSeconds
from engine.keep.flow.reasons import Waits
from engine.keep.flow.records import ReplicaFlow, WorkerFlow
from engine.protocol.reports import Doing


def replica_flow(
    node: str,
    worker: str,
    *,
    spent: ReplicaSeconds,
    waits: Waits,
    outside: OutsideSeconds,
    counts: StretchCounts,
    version: int,
) -> ReplicaFlow:
    """Make a replica's record. spent: its seconds with a task; waits: those without one."""
    replica = f"{node}@{worker}"
    waited = outside.take(replica, spent.busy)
    for_outside = sum(waited.values())
    return ReplicaFlow(
        busy=round_seconds(spent.busy - for_outside),
        for_turn=round_seconds(spent.for_turn),
        for_weights=round_seconds(spent.for_weights),
        for_rows=round_seconds(waits.kinds["for_rows"]),
        for_room=round_seconds(waits.kinds["for_room"]),
        for_outside=round_seconds(for_outside),
        idle=round_seconds(waits.kinds["idle"]),
        blames=_add_blames(spent.blames, waits.blames),
        outside={reason: round_seconds(seconds) for reason, seconds in waited.items()},
        in_flight=outside.in_flight(replica),
        chunks=counts.chunks[node, worker],
        rows=counts.rows[node, worker],
        tokens=counts.tokens[node, worker],
        version=version,
        device_peak=int(counts.node_peak[replica]),
    )


def _add_blames(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    blames: dict[str, float] = {}
    for name in {**a, **b}:
        if name:
            blames[name] = round_seconds(a.get(name, 0.0) + b.get(name, 0.0))
    return blames


def worker_flow(does: Doing, memory: Mapping[str, int], now: float) -> WorkerFlow:
    """Make a Worker's record. does: what it does, if anything. memory: its figures by their fields
    in the record.
    """
    measured = msgspec.convert(memory, WorkerFlow)
    if not does.node:
        return measured
    if does.waits_for:
        since = does.waits_since
    else:
        since = does.since
    return msgspec.structs.replace(
        measured,
        doing=does.node,
        what=does.what,
        waits_for=does.waits_for,
        doing_for=round_seconds(max(0.0, now - since)),
    )


def round_seconds(seconds: float) -> float:
    """Round to the microsecond: further digits say nothing, and take room."""
    return round(seconds, 6)
