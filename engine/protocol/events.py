"""What a run does, as one stream of typed events.

    event                    emitted
    Opened                   once, when every Worker is open and the loop knows where it begins
    InstructionTold          for each instruction, before it is carried out
    EventHeard               for each event, before the coordinator takes note of it
    WorkersMeasured          before all that a Step's numbers depend on, and about once a second
    WritingBegan             before a checkpoint, or a version that may be among the best
    WritingEnded or -Failed  after it
    StepEnded                when a Step's line is in metrics.jsonl
    FailingSilently          after a Step: the last ones taught nothing

The loop emits them, but StepEnded (engine/keep/metrics/step_accounts.py) and FailingSilently
(engine/session/silent_failures.py).

Owns: the closed set of events, and who takes which. Does not own: what a subscriber makes of one.
Times are seconds of the loop's clock. An event that nobody takes costs a look into a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine.protocol.messages import Checkpoint, Evaluated, Event, Instruction
from engine.protocol.reports import Doing, Report, SpanOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Everything is open; what was measured before belongs to no Step."""

    at: float


class InstructionTold(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator has said this."""

    at: float
    instruction: Instruction


class EventHeard(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator hears this. worker: its sender, where messages are numbered."""

    at: float
    event: Event
    worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersMeasured:
    """What Workers have measured and done since the last time, and what they are doing now."""

    at: float
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
    at: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """A Step's metrics. again: its line was there, and an evaluation has been added. step 0: the
    evaluations of a run of no Steps.
    """

    step: int
    metrics: Mapping[str, float]
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingSilently:
    """The last Steps look as if they taught nothing, though nothing failed. rule: a stable name."""

    step: int
    rule: str
    text: str


RunEvent = (
    Opened
    | InstructionTold
    | EventHeard
    | WorkersMeasured
    | WritingBegan
    | WritingEnded
    | WritingFailed
    | StepEnded
    | FailingSilently
)

Take = Callable[[Any], None]


class Subscriber(Protocol):
    """Takes the events of some kinds: classes of RunEvent, and classes of the coordinator's events
    and instructions, which come as EventHeard and InstructionTold.
    """

    takes: tuple[type, ...]

    def take(self, event: Any) -> None:
        """Take note of one. What it raises ends the run."""


class EventStream(dict[type, tuple[Take, ...]]):
    """Kind -> who takes it, the first first."""

    def __init__(self, *subscribers: Subscriber) -> None:
        super().__init__()
        for subscriber in subscribers:
            self.add(subscriber)

    def __missing__(self, kind: type) -> tuple[Take, ...]:
        return self.setdefault(kind, ())

    def add(self, subscriber: Subscriber) -> None:
        """Also this one, after the others."""
        self.on(subscriber.take, *subscriber.takes)

    def on(self, take: Take, *kinds: type) -> None:
        """Also this function."""
        for kind in kinds:
            self[kind] = (*self.get(kind, ()), take)

    def emit(self, event: RunEvent) -> None:
        """Hand it on, by its own kind."""
        for take in self[type(event)]:
            take(event)


def at_each_step(tell: Callable[[Mapping[str, float]], object], *, first: int = 0) -> Take:
    """Takes StepEnded, and tells each Step's row from `first` on: `step`, then its metrics."""

    def take(event: StepEnded) -> None:
        if event.step >= first:
            tell({"step": event.step, **event.metrics})

    return take
