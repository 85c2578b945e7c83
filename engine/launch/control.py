"""What the process of the run and a Worker's process say to each other, beside instructions and
events.

Owns: the messages of a control socket. Does not own: their bytes (wire.py), the socket
(link.py), what either end does about them (process.py, engine/launch/local.py).

    to the Worker       Open (once, first), Command, Request, Connect, PeerAddresses, Forget, Quit
    to the Supervisor   Bound, WorkerUpdate, Answer, Beat, Failed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.coordinator.messages import From, ToWorker
from engine.coordinator.refs import Ref
from engine.observe.reports import Doing, Report, SpanOf
from engine.run.workers import Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A Worker's place in its rank group, whose members meet in a file without a name: a descriptor
    beside Open.
    """

    rank: int
    world: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A Worker's part in a run on several hosts.

    address: where its channel answers, at a port of its own choice. near: the Workers of its host,
    itself among them. public, secret: its CURVE keys, made for this run; peers: the public keys of
    all Workers; none of these where the network is private, so that nothing is encrypted. lease:
    seconds within which a lost connection may come back.
    """

    worker: str
    address: str
    near: tuple[str, ...]
    public: bytes
    secret: bytes = field(repr=False)
    peers: Mapping[str, bytes]
    lease: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Who the Worker is. plan: by cloudpickle, since it has the user's functions in it; the only
    pickle that there is.

    outbox: bytes of memory that its rows may take before they go to files in `spill` (None: the
    system's folder). samples: the folder of sample files, None where this Worker writes none. seat:
    where its nodes have several ranks. network: where there are several hosts. verify: what is
    checked of rows from this host (RunOptions).
    """

    worker: str
    epoch: int
    plan: bytes
    outbox: int
    inproc: bool = False
    samples: Path | None = None
    samples_every: int = 1
    seat: Seat | None = None
    network: Network | None = None
    spill: Path | None = None
    verify: Literal["structure", "content"] = "structure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """An instruction to this incarnation; number counts them from 0."""

    epoch: int
    number: int
    instruction: ToWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that wants an Answer of the same number."""

    number: int
    request: Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """A data socket to another Worker comes with this, as a descriptor. serve: the peer asks and
    this Worker answers; else the other way round. It replaces an earlier one. met: whether both
    meet for tensors, too; the place is a second descriptor.
    """

    peer: str
    serve: bool
    met: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddresses:
    """Where the channels of Workers on other hosts answer: (worker, endpoint, epoch); of one that
    is gone, nowhere.
    """

    entries: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Where this Worker's channel answers other hosts."""

    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Drop every instruction that has not begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit:
    """Close the kernels and end; at once where one is running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUpdate:
    """What came about. ended: how many instructions this incarnation has ended (or forgotten) so
    far.
    """

    events: tuple[From, ...] = ()
    reports: tuple[Report, ...] = ()
    spans: tuple[SpanOf, ...] = ()
    ended: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A request was carried out; ref: the block that it made, where it made one. lost: it was not,
    since this Worker, whose rows it needs, is gone.
    """

    number: int
    ref: Ref | None = None
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The Worker is alive, and does this."""

    doing: Doing


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A kernel raised. kind: the name of a class of dataflow.errors; text: what it said, with its
    traceback.
    """

    kind: str
    text: str


Control = (
    Open
    | Command
    | Request
    | Connect
    | PeerAddresses
    | Bound
    | Forget
    | Quit
    | WorkerUpdate
    | Answer
    | Beat
    | Failed
)
