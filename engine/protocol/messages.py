"""What the coordinator hears and what it says: events and instructions.

    a task       its answers, with its id; the last one may be FetchFailed, or Short
    RunChunk     Produced, Tombstoned, Reported; ChunkDone; a rank that is no lead RankDone alone
    TrainStep    Stepped; of several ranks Prepared first, then Stepped after Go
    Evaluate     Evaluated
    Record       Recorded
    Offer        Offered (of several ranks, each)
    Load         Fetched, if it is to be kept; Loaded

Owns: these values, which can cross a process boundary. Does not own: what they say of rows
(refs.py), of fetches ahead (fetch_messages.py), of replicas (replica_messages.py), of memory
(memory_messages.py), of devices (turn_messages.py) and to the loop (loop_messages.py), nor how they
are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dataflow.batch import Keys
from dataflow.memory_limits import MemoryLimits
from engine.protocol.fetch_messages import FetchAhead, Fetched
from engine.protocol.loop_messages import (
    Checkpoint,
    Finish,
    PartFormed,
    Relayout,
    Rollback,
    StepClosed,
    Warn,
)
from engine.protocol.memory_messages import LimitLowered, Short
from engine.protocol.part_messages import FinishStep, PartTrained, TrainPart
from engine.protocol.refs import Gather, Key, OwnRows, Ref
from engine.protocol.replica_messages import (
    LeaveRequested,
    Respawn,
    Retire,
    ScaleRequested,
    TimePassed,
)
from engine.protocol.turn_messages import Sleep, Slept, Wake, Woken

Inputs = Mapping[str, tuple[Gather, ...]]
"""For each input, what to gather."""

# --- events: answers to tasks ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Produced:
    """Finished rows of a chunk. watermark: the tokens that each of its rows has at least that has
    not ended.
    """

    id: int
    node: str
    ref: Ref
    watermark: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstoned:
    """A row failed for good, and so its group, unless it is row_only: then the group goes on
    without it. failed: False if a node's policy gave it up.
    """

    id: int
    node: str
    key: Key
    error: str
    failed: bool = True
    row_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Metrics (name, value, count) of one run of a chunk; they count when it ends."""

    id: int
    worker: str
    metrics: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDone:
    """Every row of a chunk has come or failed; a select removed those it did not produce. Of
    several ranks the lead says so. seconds: that its kernel computed, where the chunk was alone in
    its run; else 0.
    """

    id: int
    node: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDone:
    """A rank of a replica that is not its lead has done its part of a chunk."""

    id: int
    node: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A rank has fetched and validated all that an assignment needs, and waits for Go."""

    id: int
    node: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A train node (or one rank of it) has done its updates of a Step. digest: of the weights,
    from the first rank in a run that records rows.
    """

    id: int
    node: str
    step: int
    worker: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluate node has its numbers. score: the mean reward, by which versions are compared."""

    id: int
    node: str
    version: int
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Samples and row metrics of a Step are written; its rows may go."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """The writer's Worker keeps the weights as a block. digest: the hash of the pieces' hashes."""

    id: int
    worker: str
    block: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A reader, in one Worker, has the weights of a version."""

    id: int
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed:
    """A task did not begin: the Worker that keeps what it reads (`peer`) is gone."""

    id: int
    worker: str
    peer: str


# --- events: what else is heard -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOpened:
    """A source is ready; one pass over it has `rows` rows."""

    node: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOpened:
    """All kernels of a Worker are open. epoch: its incarnation, from 0."""

    worker: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A Worker's process, and its outbox with it, is gone; silent ones are killed."""

    worker: str
    epoch: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spilled:
    """So many bytes of a Worker's outbox are in files, as it ran out of memory for them."""

    worker: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a node computes for the probe's rows with a version's weights; the loop compares writer
    and readers.

    numbers: float32, one per token but each row's first. dtypes: of the writer's weights.
    vocabulary: token ids that the node knows.
    """

    node: str
    model: str
    version: int
    reads: bool
    numbers: bytes
    vocabulary: int
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """A checkpoint is on disk."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Someone wants the run to end after the Step under way; at_once: after the last closed one.
    signal: the one that asked, if any.
    """

    reason: str
    at_once: bool = False
    signal: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequested:
    """Someone wants a checkpoint at the end of the Step under way."""


TaskEnd = (
    ChunkDone
    | RankDone
    | Stepped
    | PartTrained
    | Evaluated
    | Recorded
    | Offered
    | Loaded
    | FetchFailed
    | Short
)
"""The last answer to a task; of several ranks, each one's last."""
TaskEvent = Produced | Tombstoned | Reported | Prepared | Fetched | TaskEnd
FromWorker = TaskEvent | SourceOpened | WorkerOpened | Woken | Slept | Spilled | Probed
Wish = StopRequested | CheckpointRequested | ScaleRequested
Event = FromWorker | WorkerLost | Checkpointed | Wish | LeaveRequested | TimePassed


@dataclass(frozen=True, slots=True, kw_only=True)
class From:
    """An event as a Worker sent it. number: counts this incarnation's messages from 0, to drop
    duplicates and to put early ones in order. Events of another epoch are a zombie's.
    """

    worker: str
    epoch: int
    number: int
    event: Event


# --- instructions: tasks --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunChunk:
    """Run a node on these rows. again: they were made before, and their metrics are known. spans,
    weights: as in `dataflow.kernel.Chunk`. giver: where several ranks run it, the one that fetches
    its rows, gives them to the others, and keeps what is made; the others' inputs have no gathers.
    limits: lower than the plan's, where memory ran out.
    """

    id: int
    node: str
    worker: str
    step: int
    keys: Keys
    inputs: Inputs = field(default_factory=dict)
    again: bool = False
    spans: np.ndarray | None = None
    weights: np.ndarray | None = None
    giver: str = ""
    limits: MemoryLimits | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainStep:
    """Train a node on the rows of a Step; each rank of a node gets a message of the same id.

    keys, mine, total: of the node's own rows, as in OwnRows; of the Step's other rows a rank is
    told nothing but how many there are. inputs: gathers of these rows alone. others: the other row
    sets, by the input with their rows; a set without a row in the Step has no inputs. giver: where
    several ranks have the same rows (tensor), the one that fetches them and broadcasts them to the
    others after Go; the others' inputs have no gathers. limits: as in RunChunk.
    """

    id: int
    node: str
    worker: str
    step: int
    keys: Keys
    inputs: Inputs
    mine: np.ndarray | None = None
    total: int | None = None
    others: Mapping[str, OwnRows] = field(default_factory=dict)
    giver: str = ""
    limits: MemoryLimits | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluate:
    """Give an evaluate node all rows of its finished evaluation. lost_rows: how many of its source
    failed alone, and are left out.
    """

    id: int
    node: str
    worker: str
    version: int
    keys: Keys
    inputs: Inputs
    lost_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """Write samples and row metrics of a Step. keys, inputs: by train node, what it trains on."""

    id: int
    step: int
    keys: Mapping[str, Keys]
    inputs: Inputs
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Keep the current weights as a block, for readers elsewhere; every rank is told, and the first
    keeps them. keeps: this one does, too, as it has all of them.
    """

    id: int
    model: str
    writer: str
    worker: str
    version: int
    keeps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Bring a version of a Model to a reader in one Worker.

    alias: it shares the writer's module, and nothing moves. leader: the Model is a follower, and
    moves by `rate` towards this one's weights. source: the Worker that keeps the pieces, in block
    `block` with hash `digest`; empty where the writer is in the same Worker. keeps: the reader's
    Worker keeps the pieces as a block, too, until that is released.
    """

    id: int
    model: str
    writer: str
    reader: str
    version: int
    worker: str
    alias: bool = False
    leader: str = ""
    rate: float = 1.0
    source: str = ""
    block: int = -1
    digest: str = ""
    keeps: bool = False


Task = RunChunk | TrainStep | TrainPart | FinishStep | Evaluate | Record | Offer | Load
"""What a Worker has to answer; id: unique within one attempt at the run."""

# --- instructions: what else a Worker is told -----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Every rank of the node is prepared for this assignment: begin."""

    id: int
    node: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Nothing needs these blocks any more; their Worker may recycle them."""

    worker: str
    blocks: tuple[int, ...]


ToWorker = Task | Go | Release | FetchAhead | Wake | Sleep
"""What one Worker is told; `worker` says which."""

Instruction = (
    ToWorker
    | (Respawn | Retire | Rollback | Relayout)
    | (StepClosed | PartFormed | Warn | LimitLowered | Checkpoint | Finish)
)
