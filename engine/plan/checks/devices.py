"""Devices: who takes turns with them, and columns whose values stay on one.

Owns: turns and columns on devices. Does not own: which Worker has which device (passes/place.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from dataflow.device import declared
from dataflow.errors import nearest_or_all
from engine.plan.draft import Draft
from engine.plan.plan import PlannedEdge


def turns(draft: Draft) -> Iterator[str]:
    """Workers that take turns exist, each in one group; no ranks of one node among them."""
    seen: set[str] = set()
    there = dict.fromkeys(draft.workers)
    ranked = [(node, set(node.workers)) for node in draft.nodes if node.ranks > 1]
    for group in draft.turns:
        shown = ",".join(group)
        for worker in group:
            yield from _member(there, shown, worker, seen)
            seen.add(worker)
        if len(group) < 2:
            yield f"{shown}: one worker, which has nobody to take turns with. Fix: leave it out."
        for node, ranks in ranked:
            if len(ranks & set(group)) > 1:
                problem = f"{shown}: these are ranks of {node.name}, which act together"
                yield f"{problem}. Fix: pin {node.name} to workers of different groups."


def _member(
    there: Mapping[str, object], shown: str, worker: str, seen: Collection[str]
) -> Iterator[str]:
    """there: all Workers."""
    if worker not in there:
        fix = nearest_or_all(worker, list(there))
        yield f"{shown}: expected a worker, found {worker!r}. Fix: {fix}."
    elif worker in seen:
        fix = "one group of all that share its devices"
        yield f"{shown}: {worker} is in two groups. Fix: {fix}."


def device_columns(draft: Draft) -> Iterator[str]:
    """Columns on a device are read on its host, outside of turns; no recorded column is on one."""
    for edge in (e for e in draft.edges if e.device):
        yield from _off_host(draft, edge)
        yield from _by_turns(draft, edge)
    schemas = {n.name: n.schemas for n in draft.graph.nodes}
    for fetch in (f for i in draft.recorded for f in i.fetches):
        device = declared(schemas[fetch.producer])
        for name in (c for c in fetch.columns if c in device):
            problem = f"{fetch.producer}: {name!r} is recorded of each Step, from the host"
            yield f"{problem}. Fix: {name!r} not on a device."


def _off_host(draft: Draft, edge: PlannedEdge) -> Iterator[str]:
    made, columns = draft.node(edge.producer), ", ".join(edge.device)
    readers = {f"{edge.consumer} in {w}": w for w in draft.node(edge.consumer).workers}
    if made.region == "stream":
        readers |= {f"{draft.recorder}, which writes checkpoints,": draft.recorder}
    for sender, (who, reader) in ((s, r) for s in made.workers for r in readers.items()):
        here, there = draft.host_of(sender), draft.host_of(reader)
        if here != there:
            problem = f"{edge.producer} in {sender} has {columns} on a device of {here}"
            why = f"{who} reads it on {there}: collectives stay on one host"
            yield f"{problem}, {why}. Fix: pin {edge.producer}={sender}@{there}."


def _by_turns(draft: Draft, edge: PlannedEdge) -> Iterator[str]:
    made, columns = draft.node(edge.producer), ", ".join(edge.device)
    group = next((g for g in draft.turns if set(made.workers) & set(g)), ())
    if group:
        problem = f"{edge.producer} has {columns} on a device that {', '.join(group)} have by turns"
        fix = f"pin {edge.producer} to another worker, or {columns} without device=True"
        yield f"{problem}. Fix: {fix}."
