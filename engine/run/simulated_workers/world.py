"""What a simulated Worker knows of the others: the world that they share.

Owns: the interfaces, so that a Worker and its parts import neither each other nor what holds them.
Does not own: the world itself (workers.py), a Worker (simulated_worker.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from engine.plan.plan import Plan, PlannedNode
from engine.protocol import messages as m
from engine.run.simulated_workers.behaviour import Outcomes
from engine.run.simulated_workers.clock import VirtualClock
from engine.run.simulated_workers.cores import Process, SimulatedCores
from engine.run.simulated_workers.groups import Devices, SimulatedRanks, Work
from engine.run.simulated_workers.history import Notes
from engine.run.simulated_workers.kernel_times import KernelTimes, Rows
from engine.run.simulated_workers.outbox import SimulatedOutboxes
from engine.run.simulated_workers.parts import TrainedParts
from engine.run.simulated_workers.shorts import Shorts
from engine.run.simulated_workers.spans import SpanLog
from engine.run.simulated_workers.store import SavedRows


class RunningWorker(Process, Protocol):
    """A simulated Worker, as its chunks and files see it. events_sent: how many."""

    epoch: int
    events_sent: int

    def say(self, event: m.Event, span: int | None = None) -> None:
        """Send an event to the coordinator. span: which it comes from; None: what it does now."""
        ...

    def with_all(self, what: Work, seconds: float, end: Callable[[], None]) -> None:
        """Take a time, then call `end`; a node with ranks starts when all have come to this."""
        ...


class SharedWorld(Protocol):
    """What all Workers of one simulated run share. disk: files of rows of the checkpoint to resume
    from. log: None unless spans are wanted. proving: whether to check that all that a Worker is
    told makes sense. over: whether the run is told to end.
    """

    plan: Plan
    nodes: dict[str, PlannedNode]
    history: Notes
    kernels: KernelTimes
    outcomes: Outcomes
    disk: Mapping[Path, SavedRows]
    clock: VirtualClock
    cores: SimulatedCores
    log: SpanLog | None
    outbox: SimulatedOutboxes
    groups: SimulatedRanks
    trained_parts: TrainedParts
    shorts: Shorts
    devices: Devices
    proving: bool
    over: bool

    def say(self, worker: RunningWorker, event: m.Event, span: int = ...) -> None:
        """A Worker says something, within a span."""
        ...

    def end_short(self, worker: str) -> None:
        """A Worker ends that has said that it is short."""
        ...

    def answer(self, worker: str, number: int, answer: Any) -> None:
        """A Worker answers a request of the loop."""
        ...

    def fetching(
        self, message: Rows | m.FetchAhead, here: frozenset[tuple[str, int]] = ...
    ) -> float:
        """How long a fetch takes. here: blocks (worker, number) whose rows have been fetched."""
        ...
