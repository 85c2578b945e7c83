"""Devices: who takes turns with them, and columns whose values stay on one.

Owns: turns and columns on devices. Does not own: which Worker has which device (passes/place.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

from dataflow.device import declared_device_columns
from dataflow.errors import nearest_or_all
from engine.plan.draft import Draft
from engine.plan.planned_input import list_fetches
from engine.plan.planned_parts import PlannedEdge
from engine.plan.refusals import add_fix


def check_turns(draft: Draft) -> Iterator[str]:
    """Workers that take turns exist, each in one group; no ranks of one node among them, and none
    that train while chunks of others that have several Workers are under way.
    """
    seen: set[str] = set()
    workers = dict.fromkeys(draft.workers)
    ranked_nodes = [node for node in draft.nodes if node.ranks > 1]
    rank_groups: list[tuple[str, set[str]]] = []
    for node in ranked_nodes:
        for ranks in node.rank_groups:
            rank_groups.append((node.name, {rank.worker for rank in ranks}))
    for group in draft.turns:
        shown = ",".join(group)
        for worker in group:
            yield from _check_member(workers, shown, worker, seen)
            seen.add(worker)
        if len(group) < 2:
            problem = f"{shown}: one worker, which has nobody to take turns with"
            yield add_fix(problem, "leave it out")
        for name, workers_of_replica in rank_groups:
            if len(workers_of_replica.intersection(group)) > 1:
                problem = f"{shown}: these are ranks of {name}, which act together"
                fix = f"pin {name} to workers of different groups"
                yield add_fix(problem, fix)
    yield from _check_overlapping(draft)


def _check_overlapping(draft: Draft) -> Iterator[str]:
    """What waits for Go is in no order with chunks that wait for a turn (decision 0048)."""
    streamed = {source.name for source in draft.sources if source.part_tokens}
    in_turns = set(chain.from_iterable(draft.turns))
    trains = [node for node in draft.nodes if node.work == "train" and node.ranks > 1]
    for node in draft.nodes:
        overlaps = node.lag > 0 or node.source in streamed
        if node.work == "train" or node.ranks == 1 or not overlaps:
            continue
        for train in trains:
            both = set(node.workers) & set(train.workers)
            if both and not in_turns.isdisjoint({*node.workers, *train.workers}):
                problem = f"{node.name} has ranks where {train.name} trains meanwhile"
                why = "and they take turns with their devices"
                fix = f"pin {node.name} to other workers"
                yield add_fix(f"{problem}, {why}", fix)


def _check_member(
    workers: Collection[str], shown: str, worker: str, seen: Collection[str]
) -> Iterator[str]:
    """workers: all of the plan; seen: those of groups so far; shown: the group."""
    if worker not in workers:
        fix = nearest_or_all(worker, list(workers))
        yield add_fix(f"{shown}: expected a worker, found {worker!r}", fix)
    elif worker in seen:
        fix = "one group of all that share its devices"
        yield add_fix(f"{shown}: {worker} is in two groups", fix)


def check_device_columns(draft: Draft) -> Iterator[str]:
    """Columns on a device are read on its host, outside of turns; no recorded column is on one."""
    for edge in draft.edges:
        if edge.device:
            yield from _check_readers(draft, edge)
            yield from _check_makers(draft, edge)
    schemas = {node.name: node.schemas for node in draft.graph.nodes}
    for fetch in list_fetches(draft.recorded):
        device_columns = declared_device_columns(schemas[fetch.producer])
        for name in fetch.columns:
            if name in device_columns:
                problem = f"{fetch.producer}: {name!r} is recorded of each Step, from the host"
                fix = f"{name!r} not on a device"
                yield add_fix(problem, fix)


def _check_readers(draft: Draft, edge: PlannedEdge) -> Iterator[str]:
    """Readers are on the host of the device."""
    columns = ", ".join(edge.device)
    producer, consumer = draft.node(edge.producer), draft.node(edge.consumer)
    readers = {f"{edge.consumer} in {worker}": worker for worker in consumer.workers}
    if producer.region == "stream":
        readers[f"{draft.recorder}, which writes checkpoints,"] = draft.recorder
    for sender in producer.workers:
        for shown, reader in readers.items():
            sender_host, reader_host = draft.host_of(sender), draft.host_of(reader)
            if sender_host != reader_host:
                problem = f"{edge.producer} in {sender} has {columns} on a device of {sender_host}"
                why = f"{shown} reads it on {reader_host}: collectives stay on one host"
                fix = f"pin {edge.producer}={sender}@{reader_host}"
                yield add_fix(f"{problem}, {why}", fix)


def _check_makers(draft: Draft, edge: PlannedEdge) -> Iterator[str]:
    """The Workers that have the columns have their device at all times."""
    columns = ", ".join(edge.device)
    makers = set(draft.node(edge.producer).workers)
    for group in draft.turns:
        if not makers.isdisjoint(group):
            device = f"a device that {', '.join(group)} have by turns"
            fix = f"pin {edge.producer} to another worker, or {columns} without device=True"
            yield add_fix(f"{edge.producer} has {columns} on {device}", fix)
            return
