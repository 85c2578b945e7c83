"""Everything that a simulated run said and did, and when, each thing once; for tests and reports.

Owns: the record, made of the run's events and of what its Workers note. Does not own: whether it
makes sense (the tests).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.messages import (
    Event,
    Finish,
    Instruction,
    Rollback,
    StepClosed,
    TrainStep,
)
from engine.observe.events import EventHeard, InstructionTold, RunEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRead:
    """A chunk saw a trained Model: at its begin `first`, at its end `last`; `step` as the
    coordinator numbered it.
    """

    node: str
    region: str
    step: int
    first: int
    last: int


@dataclass(slots=True, eq=False)
class History:
    """instructions, events: with their times."""

    instructions: list[tuple[float, Instruction]] = field(default_factory=list)
    events: list[tuple[float, Event]] = field(default_factory=list)
    reads: list[ModelRead] = field(default_factory=list)
    trained: list[tuple[TrainStep, dict[str, np.ndarray]]] = field(default_factory=list)
    """Train nodes' Steps as they ended, with the version of each row by producer."""
    samples: dict[int, Mapping[str, Keys]] = field(default_factory=dict)
    """Step -> the rows of its file, as it was written last, and not deleted."""
    closed: int = 0
    """The last Step that was closed."""
    end: Finish | Rollback | None = None

    def take(self, event: RunEvent) -> None:
        """See `engine.observe.events`."""
        match event:
            case EventHeard():
                self.events.append((event.at, event.event))
            case InstructionTold():
                self.instructions.append((event.at, event.instruction))
                if isinstance(event.instruction, StepClosed):
                    self.closed = event.instruction.step
                elif isinstance(event.instruction, Finish | Rollback):
                    self.end = event.instruction
