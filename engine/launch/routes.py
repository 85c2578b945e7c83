"""Whose rows an instruction or a request is about.

Owns: reading that out of it, so that data sockets are there before they are needed. Does not
own: the sockets (local.py), fetching (engine/channels).
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.coordinator.messages import Evaluate, Load, Record, RunChunk, ToWorker, TrainStep
from engine.coordinator.refs import Gather
from engine.run.workers import Ask, Save


def sources(message: ToWorker | Ask) -> frozenset[str]:
    """The Workers that keep something of what it names."""
    match message:
        case RunChunk() | TrainStep() | Evaluate() | Record():
            return _keepers(gather for gathers in message.inputs.values() for gather in gathers)
        case Save():
            return _keepers(gather for _, gather in message.rows.values())
        case Load():
            return frozenset({message.source} - {""})
    return frozenset()


def _keepers(gathers: Iterable[Gather]) -> frozenset[str]:
    return frozenset(worker for gather in gathers for worker, _ in gather.refs)
