"""What a run measured, as lines of a drawing.

Owns: which figures a drawing shows, and in which words. Does not own: the records (flow/), the
drawing (dataflow.draw), what a plan estimated (engine/plan/drawing.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from dataflow.errors import DataError
from dataflow.program import numbered_name
from dataflow.safe_text import shown_bytes, shown_number
from engine.keep.flow.flow_sums import sum_flows
from engine.keep.flow.records import Flow, ReplicaFlow, WeightFlow
from engine.keep.flow.segments import read_steps

EVENTS = "events"
_WAITS = {
    "for_rows": "rows",
    "for_weights": "weights",
    "for_turn": "its turn",
    "for_room": "room",
    "for_outside": "",
}
"""Field of ReplicaFlow -> what it waits for; of `for_outside` the record names it."""


def measured_notes(folder: Path) -> dict[str, tuple[str, ...]]:
    """Read what a run folder measured, as means over all its Steps: lines by node, data edge `a->b`
    and weight edge `model->reader`; of a Program after `2/`. Raises DataError for a folder without
    events.
    """
    phases: dict[int, list[Flow]] = defaultdict(list)
    for record in read_steps(folder / EVENTS):
        if isinstance(record, Flow):
            phases[record.phase].append(record)
    if not phases:
        problem = "expected a run folder with the records of a Step in events/, found none"
        raise DataError(f"{folder}: {problem}. Fix: --measured runs/NAME.")
    notes: dict[str, tuple[str, ...]] = {}
    for phase, flows in phases.items():
        for name, lines in _notes(sum_flows(flows)):
            notes[numbered_name(phase, name)] = lines
    return notes


def _notes(flow: Flow) -> Iterator[tuple[str, tuple[str, ...]]]:
    length = max(flow.end - flow.start, 1e-9)
    nodes: dict[str, list[ReplicaFlow]] = defaultdict(list)
    for key, replica in flow.nodes.items():
        node, _, _ = key.partition("@")
        nodes[node].append(replica)
    for node, replicas in nodes.items():
        yield node, (_shares(replicas), *_rates(replicas, length))
    for name, edge in flow.edges.items():
        if edge.rows:
            rows = shown_number(edge.rows / length, 4)
            size = shown_bytes(round(edge.bytes / length))
            yield name, (f"{rows} rows/s, {size}/s",)
    weights: dict[str, list[WeightFlow]] = defaultdict(list)
    for key, reader in flow.weights.items():
        name, _, _ = key.partition("@")
        weights[name].append(reader)
    for name, readers in weights.items():
        for line in _loads(readers):
            yield name, (line,)


def _shares(replicas: Sequence[ReplicaFlow]) -> str:
    """`busy 54 %, waits 31 % for rows`: its work, and the wait that took most."""
    names = ("busy", *_WAITS, "idle")
    seconds: dict[str, float] = {}
    for name in names:
        seconds[name] = sum(getattr(replica, name) for replica in replicas)
    whole = sum(seconds.values()) or 1.0
    most = max(_WAITS, key=lambda name: seconds[name])
    busy_percent = seconds["busy"] / whole * 100
    words = f"busy {busy_percent:.0f} %"
    if seconds[most] >= 0.01 * whole:
        wait_percent = seconds[most] / whole * 100
        cause = _WAITS[most] or ", ".join(_reasons_outside(replicas))
        words += f", waits {wait_percent:.0f} % for {cause}"
    return words


def _reasons_outside(replicas: Sequence[ReplicaFlow]) -> list[str]:
    reasons: dict[str, None] = {}
    for replica in replicas:
        reasons |= dict.fromkeys(replica.outside)
    return list(reasons)


def _rates(replicas: Sequence[ReplicaFlow], length: float) -> list[str]:
    rows = sum(replica.rows for replica in replicas)
    tokens = sum(replica.tokens for replica in replicas)
    rates: list[str] = []
    if rows:
        rates.append(f"{shown_number(rows / length, 4)} rows/s")
    if tokens:
        rates.append(f"{shown_number(tokens / length, 4)} tokens/s")
    if rates:
        return [", ".join(rates)]
    return []


def _loads(readers: Sequence[WeightFlow]) -> list[str]:
    loads = sum(reader.loads for reader in readers)
    if not loads:
        return []
    seconds = sum(reader.seconds for reader in readers) / loads
    return [f"{loads} loads, {seconds * 1e3:,.0f} ms each"]
