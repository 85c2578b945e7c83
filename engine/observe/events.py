"""What a run does, as one stream of typed events.

    event                   emitted by the loop
    Opened                  once, when every Worker is open and knows where it begins
    InstructionTold         for each instruction, before it is carried out
    EventHeard              for each event, before the coordinator takes note of it
    WorkersMeasured         before all that a Step's numbers depend on
    WritingBegan,           before a checkpoint, or a version that may be among the best
    WritingEnded or Failed  after it
    StepEnded               (by accounts.py) when a Step's line is in metrics.jsonl

Owns: the closed set of events, and their way to every subscriber, in order. Does not own: what a
subscriber makes of one: each has a method `take`. Times are seconds of the loop's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.coordinator.messages import Checkpoint, Evaluated, Event, Instruction
from engine.observe.reports import Doing, Report, SpanOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Everything is open; what was measured before belongs to no Step."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionTold:
    """The coordinator has said this."""

    at: float
    instruction: Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class EventHeard:
    """The coordinator hears this. worker: its sender, where messages are numbered."""

    at: float
    event: Event
    worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersMeasured:
    """What Workers have measured and done since the last time, and what they are doing now."""

    reports: Sequence[Report]
    spans: Sequence[SpanOf]
    doing: Sequence[Doing]


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingBegan:
    """The loop begins to wait for the files of a checkpoint, or of a version that may be kept."""

    of: Checkpoint | Evaluated
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingEnded:
    """They are on the disk."""

    of: Checkpoint | Evaluated
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingFailed:
    """They are not: a Worker was lost meanwhile."""

    of: Checkpoint | Evaluated
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """A Step's metrics. again: its line was there, and an evaluation has been added."""

    step: int
    metrics: Mapping[str, float]
    again: bool = False


RunEvent = (
    Opened
    | InstructionTold
    | EventHeard
    | WorkersMeasured
    | WritingBegan
    | WritingEnded
    | WritingFailed
    | StepEnded
)

Subscriber = Callable[[RunEvent], None]


class EventStream:
    """Hands each event to all subscribers, in their order."""

    def __init__(self, *subscribers: Subscriber) -> None:
        self._subscribers = list(subscribers)

    def add(self, subscriber: Subscriber) -> None:
        """Add a subscriber after the others."""
        self._subscribers.append(subscriber)

    def emit(self, event: RunEvent) -> None:
        """Hand it on. What a subscriber raises ends the run."""
        for take in self._subscribers:
            take(event)


def at_each_step(tell: Callable[[Mapping[str, float]], object]) -> Subscriber:
    """A subscriber that is told each Step's row: `step`, then its metrics."""

    def take(event: RunEvent) -> None:
        if isinstance(event, StepEnded):
            tell({"step": event.step, **event.metrics})

    return take
