"""What the coordinator hears and what it says: events and instructions.

    a task       its answers, with its id; the last one may be FetchFailed
    RunChunk     Produced, Tombstoned, Reported; ChunkDone
    TrainStep    Stepped; of several ranks Prepared first, then Stepped after Go
    Evaluate     Evaluated
    Record       Recorded
    Offer        Offered (of several ranks, each)
    Load         Loaded

Owns: these values, which can cross a process boundary. Does not own: what they say of rows
(refs.py), nor how they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dataflow.batch import Keys
from dataflow.errors import GraphWarning
from engine.coordinator.refs import Gather, Key, Ref, SourceCut

Inputs = Mapping[str, tuple[Gather, ...]]
"""For each input, what to gather."""

# --- events: answers to tasks ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Produced:
    """Finished rows of a chunk."""

    id: int
    node: str
    ref: Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstoned:
    """A row that failed for good, and its group with it. failed: not by the node's own policy."""

    id: int
    node: str
    key: Key
    error: str
    failed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Metrics (name, value, count) of a run of a chunk; they count when that ends."""

    id: int
    worker: str
    metrics: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDone:
    """All rows of a chunk have come, or failed; what a select did not produce, it removed."""

    id: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A rank has fetched and validated everything of an assignment and waits for Go."""

    id: int
    node: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A train node (one rank of it, where it has several) has done its updates of a Step."""

    id: int
    node: str
    step: int
    worker: str


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
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """The writer's Worker keeps the weights as a block. digest: the hash of the pieces' hashes."""

    id: int
    model: str
    version: int
    worker: str
    block: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A reader, in one Worker, has the weights of a version."""

    id: int
    node: str
    model: str
    version: int
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed:
    """A task was not begun, as the Worker that keeps what it reads (`peer`) is gone. What was
    fetched for it is let go.
    """

    id: int
    worker: str
    peer: str


# --- events: what else is heard -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOpened:
    """A source is ready; it has `rows` rows in one pass."""

    node: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOpened:
    """All kernels of a Worker are open. epoch: its incarnation, from 0."""

    worker: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A Worker's process is gone, or was killed as it was silent, and its outbox with it."""

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
    """So many bytes of a Worker's outbox lie in files, as it has gone over its memory."""

    worker: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a node says of the probe's rows with a version's weights; the loop compares writer and
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


TaskEnd = ChunkDone | Stepped | Evaluated | Recorded | Offered | Loaded | FetchFailed
"""The last answer to a task; of several ranks, each one's last."""
TaskEvent = Produced | Tombstoned | Reported | Prepared | TaskEnd
FromWorker = TaskEvent | SourceOpened | WorkerOpened | Woken | Slept | Spilled | Probed
Event = FromWorker | WorkerLost | Checkpointed | StopRequested


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


# --- instructions: tasks --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunChunk:
    """Run a node on these rows. again: they were made before, and their metrics are known."""

    id: int
    node: str
    worker: str
    step: int
    keys: Keys
    inputs: Inputs = field(default_factory=dict)
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainStep:
    """Train a node on the rows of a Step.

    keys: all rows of the Step. mine: which of them (ascending indices) this rank is given, None for
    all; the gathers of `inputs` speak of these rows alone. Each rank of a node gets a message of
    the same id; it fetches, answers Prepared, and begins when Go comes. giver: where several ranks
    have the same rows (tensor), the one of them that fetches; it gives them to the others by a
    broadcast after Go. These have inputs without gathers.
    """

    id: int
    node: str
    worker: str
    step: int
    keys: Keys
    inputs: Inputs
    mine: np.ndarray | None = None
    giver: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluate:
    """Give an evaluate node all rows of its finished evaluation."""

    id: int
    node: str
    worker: str
    version: int
    keys: Keys
    inputs: Inputs


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
    """Keep the weights of now as a block, for readers elsewhere; every rank is told."""

    id: int
    model: str
    writer: str
    worker: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Bring a version of a Model to a reader in one Worker.

    alias: it shares the writer's module, and nothing moves. leader: the Model is a follower, and
    moves by `rate` towards this one's weights. source: the Worker that keeps the pieces, as the
    block `block` whose digest has to be `digest`; empty where the writer is in the same Worker.
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


Task = RunChunk | TrainStep | Evaluate | Record | Offer | Load
"""What a Worker has to answer; id: unique in an attempt at the run."""

# --- instructions: what else a Worker is told -----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Every rank of the node is prepared for this assignment: begin."""

    id: int
    node: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """These blocks have no live row left; their Worker may recycle them."""

    worker: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Take the devices up: until Sleep they are this Worker's.

    A Worker that shares its devices begins asleep: its kernels give them back before it says that
    it has opened.
    """

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Give the devices back: what was told before has ended, but for an assignment that is prepared
    and waits for Go, which is let go as another of the same node would do. The outbox goes on
    serving, and requests are answered.
    """

    worker: str


ToWorker = Task | Go | Release | Wake | Sleep
"""What one Worker is told; `worker` says which."""

# --- instructions: what the loop does -------------------------------------------------------------


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
    """Write a checkpoint of this cut; `rows`: the finished untrained rows of each node.

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


Instruction = ToWorker | Respawn | Rollback | StepClosed | Warn | Checkpoint | Finish
