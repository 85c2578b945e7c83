"""Instructions that the loop carries out itself, and no Worker.

Owns: these values. Does not own: what Workers are told and say (messages.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dataflow.batch import Keys
from dataflow.errors import GraphWarning
from engine.protocol.refs import Gather, SourceCut


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Only a checkpoint has what is lost: go back to the last one and restart every Worker."""

    worker: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClosed:
    """A Step is trained, recorded, published, and evaluated where due. metrics: the coordinator's
    own.

    Step 0 is what comes before the first. The last Step is closed a second time, without metrics,
    if evaluations turned out to be due when it proved to be the last.
    """

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFormed:
    """Groups of a source are the next part of a Step, whose other groups are still generated. part:
    counts from 0 in each Step. positions: of the groups, ascending.
    """

    step: int
    source: str
    part: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn:
    """Something looks wrong in the run; it may be said several times, and is shown once."""

    warning: GraphWarning


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """Write a checkpoint of this cut. rows: the finished untrained rows of each node. evaluated:
    the version at which each evaluate node ran last. timed: it is due by the clock alone.
    """

    step: int
    sources: Mapping[str, SourceCut]
    rows: Mapping[str, tuple[Keys, Gather]]
    evaluated: Mapping[str, int] = field(default_factory=dict)
    timed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayout:
    """The checkpoint of this Step is written: go on from it with another layout of the run's table.
    before: the number of the layout that ends. reason: in words. forced: it does not fit any more.
    """

    step: int
    before: int
    layout: int
    reason: str
    forced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run is over; error: why, where it failed."""

    reason: str
    error: str = ""
