"""What the coordinator hears and what it says.

Owns: events, instructions, and Refs: rows by reference. All are plain values that can
cross a process boundary. Does not own: how they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dataflow.batch import Keys

NO_VERSION = -1
"""The version of rows that no trained Model made."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ref:
    """A block of rows by reference; a few bytes a row.

    lengths int64 [rows]: tokens of each row. version int32 [rows]: the oldest version among a row's tokens, NO_VERSION
    where no trained Model made it.
    """

    worker: str
    block: int
    keys: Keys
    lengths: np.ndarray
    version: np.ndarray


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOpened:
    """A source is ready; it has `rows` rows in one pass."""

    node: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Produced:
    """Finished rows of a chunk."""

    chunk: int
    node: str
    ref: Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstoned:
    """A row that failed for good; the group of its prompt is dropped."""

    chunk: int
    node: str
    key: tuple[int, int, int]
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDone:
    """All rows of a chunk have been produced or tombstoned; what a select did not produce, it removed."""

    chunk: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A train node has done its updates of a Step."""

    node: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A reader has the weights of a version."""

    node: str
    model: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluate node has its numbers."""

    node: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Samples and row metrics of a Step are written; its rows may go."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """A checkpoint is on disk."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Somebody wants the run to end after the Step that is under way; at_once: after the last one that is closed."""

    reason: str
    at_once: bool = False


Event = (
    SourceOpened
    | Produced
    | Tombstoned
    | ChunkDone
    | Stepped
    | Loaded
    | Evaluated
    | Recorded
    | Checkpointed
    | StopRequested
)

# --- the cut -----------------------------------------------------------------------------------------------------

Key = tuple[int, int, int]
"""(position, sample, attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCut:
    """The rows of one source at a Step boundary; each position is in one of four states.

    next: the first position that was not made yet. watermark: all positions below it are retired (trained, or given up
    for good). retired: the retired positions at or above it, ascending. running: prompts that begin again, with attempt
    + 1, in the order of their admission. finished: prompts whose rows wait to be trained, likewise (sample is 0 in
    both). admitted and dropped: how many prompts were so far, for the metrics and the error budget.
    """

    next: int = 0
    watermark: int = 0
    retired: tuple[int, ...] = ()
    running: tuple[Key, ...] = ()
    finished: tuple[Key, ...] = ()
    admitted: int = 0
    dropped: int = 0


# --- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gather:
    """Where the rows of one fetch lie: for each row of the assignment, the block (an index into `refs`) and its row."""

    producer: str
    columns: tuple[str, ...]
    refs: tuple[tuple[str, int], ...]
    """(worker, block) of each block that occurs."""
    block: np.ndarray
    row: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunChunk:
    """Run a node on these rows. `inputs`: for each input, what to gather."""

    id: int
    node: str
    worker: str
    step: int
    keys: Keys
    inputs: Mapping[str, tuple[Gather, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainStep:
    """Train a node on the rows of a Step."""

    sequence: int
    node: str
    worker: str
    step: int
    keys: Keys
    inputs: Mapping[str, tuple[Gather, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluate:
    """Give an evaluate node all rows of its finished evaluation."""

    node: str
    worker: str
    version: int
    keys: Keys
    inputs: Mapping[str, tuple[Gather, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """Write samples and row metrics of a trained Step."""

    step: int
    keys: Keys
    inputs: Mapping[str, tuple[Gather, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Bring a version of a Model from its writer to a reader. alias: they share the module, nothing moves."""

    model: str
    writer: str
    reader: str
    version: int
    alias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """Move a follower towards its leader by `rate`, in the readers that have it."""

    model: str
    leader: str
    writer: str
    reader: str
    rate: float
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """These blocks have no live row left; their worker may recycle them."""

    worker: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClosed:
    """A Step is complete: trained, recorded, published, evaluated where due. `metrics` are the coordinator's own.

    Step 0 is what comes before the first. The last Step is closed a second time, without metrics, where it was known
    only later that it is the last and evaluations were still due.
    """

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """Write a checkpoint of this cut; `rows`: for each node, the finished untrained rows to keep, with their keys."""

    step: int
    sources: Mapping[str, SourceCut]
    rows: Mapping[str, tuple[Keys, Gather]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run is over; `error` says why where it failed."""

    reason: str
    error: str = ""


Instruction = RunChunk | TrainStep | Evaluate | Record | Publish | Follow | Release | StepClosed | Checkpoint | Finish
