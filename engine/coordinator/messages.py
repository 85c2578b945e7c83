"""What the coordinator hears and what it says.

Owns: events, instructions, and Refs: rows by reference. All are plain values that can
cross a process boundary. Does not own: how they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dataflow.batch import Keys
from dataflow.errors import GraphWarning

NO_VERSION = -1
"""The version of rows that no trained Model made."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ref:
    """A block of rows by reference; a few bytes a row.

    lengths int64 [rows]: tokens of each row. version int32 [rows]: what a row's oldest token counts
    as (ages.py), NO_VERSION where nothing that is trained made it. digest uint64 [rows]: a hash of
    each row's content, by which rows that were made twice are compared; empty where nothing can
    make a row twice (one process).
    """

    worker: str
    block: int
    keys: Keys
    lengths: np.ndarray
    version: np.ndarray
    digest: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))


# --- events ---------------------------------------------------------------------------------------


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
    """A row that failed for good; the group of its prompt is dropped. failed: False where the
    node's own policy gave it up, which no error budget counts.
    """

    chunk: int
    node: str
    key: tuple[int, int, int]
    error: str
    failed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDone:
    """All rows of a chunk have been produced or tombstoned; what a select did not produce, it
    removed.
    """

    chunk: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed:
    """Rows could not be fetched, as the Worker that kept them (`peer`) is gone: the chunk, or for a
    rank of a train node the assignment (`sequence`), was not begun. What it had fetched it has let
    go.
    """

    node: str
    worker: str
    peer: str
    chunk: int = -1
    sequence: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A rank has fetched and validated everything of an assignment and waits for Go."""

    node: str
    worker: str
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A train node (one rank of it, where it has several) has done its updates of a Step."""

    node: str
    step: int
    worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """The writer's Worker keeps a version's weights as a block; digest: the hash of the pieces'
    hashes.
    """

    model: str
    version: int
    worker: str
    block: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A reader, in one Worker, has the weights of a version."""

    node: str
    model: str
    version: int
    worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluate node has its numbers. score: the mean of the reward that it reads, by which
    versions are compared.
    """

    node: str
    version: int
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOpened:
    """All kernels of a Worker are open. epoch: its incarnation, from 0; a respawned one has the
    next.
    """

    worker: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A Worker's process is gone (or was killed as it no longer answered), and its outbox with it."""

    worker: str
    epoch: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken:
    """A Worker has taken up its devices."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slept:
    """A Worker has given its devices back."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spilled:
    """A Worker's outbox has gone over its memory: so many bytes of it lie in files; 0 when none
    does any more.
    """

    worker: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a node says of the probe's rows with a version's weights: the loop compares writer and
    readers.

    numbers: float32, of each token but a row's first. dtypes: of the writer's weights. vocabulary:
    token ids that the node knows.
    """

    node: str
    model: str
    version: int
    reads: bool
    numbers: bytes
    vocabulary: int
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Metrics (name, value, count) of a run of a chunk: the loop counts those of one run, whichever
    ends.
    """

    chunk: int
    worker: str
    metrics: tuple[tuple[str, float, float], ...]


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
    """Somebody wants the run to end after the Step that is under way; at_once: after the last one
    that is closed. signal: the one that asked for it, where one did.
    """

    reason: str
    at_once: bool = False
    signal: int = 0


Event = (
    SourceOpened
    | Produced
    | Tombstoned
    | ChunkDone
    | Stepped
    | Loaded
    | FetchFailed
    | Prepared
    | Offered
    | Evaluated
    | Recorded
    | Checkpointed
    | StopRequested
    | WorkerOpened
    | WorkerLost
    | Woken
    | Slept
    | Spilled
    | Probed
    | Reported
)


@dataclass(frozen=True, slots=True, kw_only=True)
class From:
    """An event as a Worker sent it. number: counts what this incarnation has sent, from 0:
    duplicates are dropped, and what came too early waits for what is before it. Events of another
    epoch than the Worker's are a zombie's.
    """

    worker: str
    epoch: int
    number: int
    event: Event


# --- the cut --------------------------------------------------------------------------------------

Key = tuple[int, int, int]
"""(position, sample, attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCut:
    """The rows of one source at a Step boundary; each position is in one of four states.

    next: the first position that was not made yet. watermark: all positions below it are retired
    (trained, or given up for good). retired: the retired positions at or above it, ascending.
    running: prompts that begin again, with attempt + 1, in the order of their admission. finished:
    prompts whose rows wait to be trained, likewise (sample is 0 in both). admitted, dropped and
    overlong (given up by a node's own policy): how many prompts were so far, for the metrics and
    the error budget.
    """

    next: int = 0
    watermark: int = 0
    retired: tuple[int, ...] = ()
    running: tuple[Key, ...] = ()
    finished: tuple[Key, ...] = ()
    admitted: int = 0
    dropped: int = 0
    overlong: int = 0


# --- instructions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gather:
    """Where the rows of one fetch lie: for each row of the assignment, the block (an index into
    `refs`) and its row.

    keys: of an input that is reduced, whose rows are others than the assignment's: for each of them
    the key of the row of the assignment that it belongs to.
    """

    producer: str
    columns: tuple[str, ...]
    refs: tuple[tuple[str, int], ...]
    """(worker, block) of each block that occurs."""
    block: np.ndarray
    row: np.ndarray
    keys: Keys | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunChunk:
    """Run a node on these rows. `inputs`: for each input, what to gather. again: they were made
    before and are lost; their metrics are known.
    """

    id: int
    node: str
    worker: str
    step: int
    keys: Keys
    inputs: Mapping[str, tuple[Gather, ...]] = field(default_factory=dict)
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainStep:
    """Train a node on the rows of a Step.

    keys: all rows of the Step. mine: which of them (ascending indices) this rank is given, None for
    all; the gathers of `inputs` speak of these rows alone. A node of several ranks gets one message
    a rank, of one sequence; each rank fetches, answers Prepared, and begins when Go comes. giver:
    where several ranks have the same rows (tensor), the one of them that fetches; it gives them to
    the others by a broadcast after Go. These have inputs without gathers.
    """

    sequence: int
    node: str
    worker: str
    step: int
    keys: Keys
    inputs: Mapping[str, tuple[Gather, ...]]
    mine: np.ndarray | None = None
    giver: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Every rank of the node is prepared for this assignment: begin."""

    node: str
    worker: str
    sequence: int


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
    """Write samples and row metrics of a Step. keys, inputs: by train node, the rows that it trains
    on.
    """

    step: int
    keys: Mapping[str, Keys]
    inputs: Mapping[str, tuple[Gather, ...]]
    worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Keep the weights as they are now as a block, for readers elsewhere (every rank of the writer
    is told).
    """

    model: str
    writer: str
    worker: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Bring a version of a Model to a reader in one Worker. alias: it shares the writer's module,
    nothing moves; otherwise the pieces are the block `block` of the Worker `source`, whose digest
    has to be `digest`.
    """

    model: str
    writer: str
    reader: str
    version: int
    alias: bool
    worker: str = ""
    source: str = ""
    block: int = -1
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """Move a follower towards its leader by `rate`, in one Worker of a reader that has it; source,
    block and digest as in Publish, none where the writer is in the same Worker.
    """

    model: str
    leader: str
    writer: str
    reader: str
    rate: float
    version: int
    worker: str = ""
    source: str = ""
    block: int = -1
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """These blocks have no live row left; their worker may recycle them."""

    worker: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Take the devices up: until Sleep they are this Worker's.

    A Worker of a lease begins asleep: its kernels give their devices back before it tells that it
    has opened.
    """

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Give the devices back: what was told before has ended, but for an assignment that is prepared
    and waits for Go, which is let go as another of the same node would do. The outbox goes on
    serving, and asks are answered.
    """

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Respawn:
    """Kill what is left of these Workers, and start them anew with the next epoch."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """State is lost that only a checkpoint has: the run goes back to its last one, with every
    Worker begun anew.
    """

    worker: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClosed:
    """A Step is complete: trained, recorded, published, evaluated where due. `metrics` are the
    coordinator's own.

    Step 0 is what comes before the first. The last Step is closed a second time, without metrics,
    where it was known only later that it is the last and evaluations were still due.
    """

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn:
    """Something looks wrong in the run; it may be said several times, and is shown once."""

    warning: GraphWarning


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """Write a checkpoint of this cut; `rows`: for each node, the finished untrained rows to keep,
    with their keys.

    evaluated: the version at which each evaluate node ran last. timed: it is due by the clock
    alone.
    """

    step: int
    sources: Mapping[str, SourceCut]
    rows: Mapping[str, tuple[Keys, Gather]]
    evaluated: Mapping[str, int] = field(default_factory=dict)
    timed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run is over; `error` says why where it failed."""

    reason: str
    error: str = ""


ToWorker = (
    RunChunk
    | TrainStep
    | Go
    | Evaluate
    | Record
    | Offer
    | Publish
    | Follow
    | Release
    | Wake
    | Sleep
)
"""What one Worker is told; `worker` says which."""

Instruction = ToWorker | Respawn | Rollback | StepClosed | Warn | Checkpoint | Finish
