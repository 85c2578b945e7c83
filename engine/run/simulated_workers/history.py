"""The record of a simulated run, made of its events and of what its Workers note; for tests.

Does not own: whether it makes sense (the tests).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, get_args

import numpy as np

from dataflow.batch import Keys
from engine.protocol import messages as m
from engine.protocol.events import EventHeard, InstructionTold, RunEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRead:
    """Versions of a trained Model that a chunk read: `first` at its start, `last` at its end."""

    node: str
    region: str
    step: int
    first: int
    last: int


class Notes(Protocol):
    """Who is told what simulated Workers know, and no event says."""

    def note_read(self, read: ModelRead) -> None:
        """A chunk has ended."""
        ...

    def note_trained(self, message: m.TrainStep, versions: dict[str, np.ndarray]) -> None:
        """All ranks of a node have done their updates; the rows are those of all."""
        ...

    def note_samples(self, step: int, keys: Mapping[str, Keys]) -> None:
        """The recorder has written a Step's samples."""
        ...


@dataclass(slots=True, eq=False)
class History:
    """The record of one run. instructions, events: with their times."""

    instructions: list[tuple[float, m.Instruction]] = field(default_factory=list)
    events: list[tuple[float, m.Event]] = field(default_factory=list)
    reads: list[ModelRead] = field(default_factory=list)
    trained: list[tuple[m.TrainStep, dict[str, np.ndarray]]] = field(default_factory=list)
    """Assignments of train nodes as they ended, with each row's version by producer."""
    samples: dict[int, Mapping[str, Keys]] = field(default_factory=dict)
    """Step -> the rows of its sample file, as last written."""
    closed: int = 0
    """The last Step that was closed."""
    end: m.Finish | m.Rollback | m.Relayout | None = None

    def note_read(self, read: ModelRead) -> None:
        """See Notes."""
        self.reads.append(read)

    def note_trained(self, message: m.TrainStep, versions: dict[str, np.ndarray]) -> None:
        """See Notes."""
        self.trained.append((message, versions))

    def note_samples(self, step: int, keys: Mapping[str, Keys]) -> None:
        """See Notes."""
        self.samples[step] = keys

    takes = (*get_args(m.Event), *get_args(m.Instruction))

    def take(self, event: RunEvent) -> None:
        """See `engine.protocol.events`."""
        match event:
            case EventHeard():
                self.events.append((event.at, event.event))
            case InstructionTold():
                self.instructions.append((event.at, event.instruction))
                if isinstance(event.instruction, m.StepClosed):
                    self.closed = event.instruction.step
                elif isinstance(event.instruction, m.Finish | m.Rollback | m.Relayout):
                    self.end = event.instruction
